"""What a call costs where nothing changed: the look at 300 weights, and all else of a call."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

from amp_fx.bench.compare import LIMIT, Figure, compare
from amp_fx.bench.contenders import Workload
from amp_fx.bench.timing import time_in_turns
from amp_fx.demo.models import MLP
from amp_fx.weights.cast_plan import Plan
from amp_fx.weights.kept_cast import Slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.bench.compare import Comparison, Watch
    from amp_fx.bench.settings import Settings

WEIGHTS_PER_LAYER = 2
"""A linear layer's weight and bias."""


def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    """Times the cache's quick way alone, then whole calls."""
    depth = settings.pick(tiny=2, cpu=150)
    yield _look(settings, WEIGHTS_PER_LAYER * depth, watch)
    x = torch.randn(1, 8, device=settings.device)
    workload = Workload(f"Linear(8) x{depth}, batch 1", functools.partial(MLP, 8, depth), (x,))
    comparison, _ = compare(workload, settings, watch)
    yield comparison
    medians = {measured.name: measured.timing.median for measured in comparison.measured}
    if {"amp_fx", LIMIT} <= medians.keys():
        yield Figure("a call of amp_fx", 1e6 * medians["amp_fx"], "µs")
        yield Figure("a call of limit", 1e6 * medians[LIMIT], "µs")


def _look(settings: Settings, num_weights: int, watch: Watch) -> Figure:
    """The time to see that no weight changed."""
    name = f"looking at {num_weights} weights that did not change"
    watch(name, 0, 1)
    weights = [nn.Parameter(torch.ones(8, 8, device=settings.device)) for _ in range(num_weights)]
    slots = [Slot(index, settings.dtype, is_read=False) for index in range(num_weights)]
    plan = Plan(slots, owner="bench", passed=(), writes_inputs=False, verify=False)
    timings = time_in_turns(
        {"look": lambda: _discard(plan.lows(weights))},
        repeats=settings.repeats,
        steps=settings.steps,
        device=settings.device,
    )
    return Figure(name, 1e6 * timings["look"].median, "µs")


def _discard(_: object) -> None:
    """Makes a function that returns something one that returns nothing."""
