"""A loop over an LSTM cell: the same weights, and the same casts, at each time step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from amp_fx.bench.contenders import Workload
from amp_fx.demo.models import LoopedCell, Loss

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.bench.settings import Settings


def workloads(settings: Settings) -> Iterator[Workload]:
    """Inference, then training."""
    width = settings.pick(tiny=8, cpu=512)
    steps = settings.pick(tiny=2, cpu=16)
    batch = settings.pick(tiny=2, cpu=4, accelerator=32)
    x = torch.randn(steps, batch, width, device=settings.device)
    targets = torch.randint(width, (batch,), device=settings.device)
    name = f"{steps} steps of {width}, batch {batch}"
    build = functools.partial(LoopedCell, width)
    yield Workload(f"inference, {name}", build, (x,))
    yield Workload(f"training, {name}", lambda: Loss(build()), (x, targets), micro_batches=1)
