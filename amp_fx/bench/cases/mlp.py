"""Stacked linear layers at small batches: reading weights is nearly all there is to do."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from amp_fx.bench.contenders import Workload
from amp_fx.demo.models import MLP

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
