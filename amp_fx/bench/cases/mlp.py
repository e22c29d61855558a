"""Stacked linear layers at small batches: weights are nearly all there is to read or to update."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from amp_fx.bench.contenders import MICRO_BATCHES, Workload
from amp_fx.demo.models import MLP, Loss

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.bench.settings import Settings


def workloads(settings: Settings) -> Iterator[Workload]:
    """A deep and a wide one, at batch 1 and 4."""
    for usual, depth in ((1024, 6), (4096, 2)):
        width = settings.pick(tiny=usual // 64, cpu=usual)
        build = functools.partial(MLP, width, depth)
        for batch in (1, 4):
            x = torch.randn(batch, width, device=settings.device)
            yield Workload(f"Linear({width}) x{depth}, batch {batch}", build, (x,))


def train_workloads(settings: Settings) -> Iterator[Workload]:
    """Fused AdamW: one kernel writes every weight, once per 1, 4 or 16 casts of them."""
    width = settings.pick(tiny=16, cpu=512)
    depth = settings.pick(tiny=2, cpu=9)
    batch = settings.pick(tiny=2, cpu=32)
    x = torch.randn(batch, width, device=settings.device)
    classes = torch.randint(width, (batch,), device=settings.device)
    for micro_batches in MICRO_BATCHES:
        yield Workload(
            f"Linear({width}) x{depth}, fused AdamW, {micro_batches} micro-batches of {batch}",
            lambda: Loss(MLP(width, depth)),
            (x, classes),
            micro_batches=micro_batches,
        )
