"""A convolutional network shaped like ResNet-18."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from amp_fx.bench.contenders import Workload
from amp_fx.demo.models import Loss, ResNet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.bench.settings import Settings

NUM_CLASSES = 100


def workloads(settings: Settings) -> Iterator[Workload]:
    """Inference of one image, then training."""
    side = settings.pick(tiny=32, cpu=64, accelerator=224)
    width = settings.pick(tiny=4, cpu=64)
    batch = settings.pick(tiny=2, cpu=4, accelerator=32)
    build = functools.partial(ResNet, width, settings.pick(tiny=1, cpu=2), NUM_CLASSES)
    images = torch.randn(batch, 3, side, side, device=settings.device)
    classes = torch.randint(NUM_CLASSES, (batch,), device=settings.device)
    yield Workload(f"inference, 1 image of {side}", build, (images[:1].clone(),))
    yield Workload(
        f"training, {batch} images of {side}",
        lambda: Loss(build()),
        (images, classes),
        micro_batches=1,
    )
