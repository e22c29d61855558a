"""A small vision Transformer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from amp_fx.bench.contenders import Workload
from amp_fx.demo.models import Loss, Size, ViT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.bench.settings import Settings

NUM_CLASSES = 100


def workloads(settings: Settings) -> Iterator[Workload]:
    """Inference, then training."""
    side = settings.pick(tiny=8, cpu=64, accelerator=224)
    patch = settings.pick(tiny=4, cpu=8, accelerator=16)
    size = Size(
        width=settings.pick(tiny=16, cpu=192, accelerator=384),
        depth=settings.num_layers(settings.pick(tiny=1, cpu=6, accelerator=12)),
        heads=settings.pick(tiny=2, cpu=3, accelerator=6),
        context=(side // patch) ** 2,
    )
    batch = settings.pick(tiny=2, cpu=4, accelerator=32)
    images = torch.randn(batch, 3, side, side, device=settings.device)
    classes = torch.randint(NUM_CLASSES, (batch,), device=settings.device)
    name = f"{size.depth} layers of {size.width}, {batch} images of {side}"
    build = functools.partial(ViT, size, patch, NUM_CLASSES)
    yield Workload(f"inference, {name}", build, (images,))
    yield Workload(f"training, {name}", lambda: Loss(build()), (images, classes), micro_batches=1)
