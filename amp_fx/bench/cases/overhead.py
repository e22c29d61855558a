"""Times the overhead of the cache with 300 small weights.

If no weight changed, these are the freshness check and the rest of a call. If all changed, it is
the refresh without the copies.
"""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING

import torch
from torch import nn

from amp_fx.bench.compare import Figure, compare
from amp_fx.bench.contenders import AMP_FX, BY_NAME, LIMIT, UNFROZEN, Workload, compiled
from amp_fx.bench.timing import WARM_UP_CALLS, time_in_turns
from amp_fx.demo.models import MLP
from amp_fx.graphs.casts import CONVERT
from amp_fx.graphs.metadata import VALUE
from amp_fx.torch_private.kernels import foreach_copy_, foreach_mul_
from amp_fx.weights.call import CachedCall
from amp_fx.weights.engine import is_available
from amp_fx.weights.split import Prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from amp_fx.bench.compare import Comparison, Watch
    from amp_fx.bench.settings import Settings
    from amp_fx.weights.split import CachedValueSpec

WEIGHTS_PER_LAYER = 2
"""The weight and the bias of a linear layer."""
WIDTH = 8
ROUNDS_PER_REPEAT = 10
"""Rounds of the refresh per repeat. A round is one call, because later calls find fresh values."""
STALE, FRESH, COPYING = "stale", "fresh", "copying"


def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    """Times the freshness check alone, then calls, then a refresh."""
    depth = settings.pick(tiny=2, cpu=150)
    if is_available():
        yield _freshness_check(settings, WEIGHTS_PER_LAYER * depth, watch)
    x = torch.randn(1, WIDTH, device=settings.device)
    build = functools.partial(MLP, WIDTH, depth)
    workload = Workload(f"Linear({WIDTH}) x{depth}, batch 1", build, (x,))
    comparison, _ = compare(workload, settings, watch)
    yield comparison
    medians = {measured.name: measured.timing.median for measured in comparison.measured}
    if {AMP_FX, LIMIT} <= medians.keys():
        above = statistics.median(
            amp_fx_time - limit_time for amp_fx_time, limit_time in comparison.rounds(AMP_FX, LIMIT)
        )
        yield Figure("a call of amp_fx", 1e6 * medians[AMP_FX], "µs")
        yield Figure("a call of limit", 1e6 * medians[LIMIT], "µs")
        yield Figure("a call of amp_fx, above limit, round by round", 1e6 * above, "µs")
    if settings.takes_part(AMP_FX):
        yield _refresh(build, x, settings, watch)


def _freshness_check(settings: Settings, num_weights: int, watch: Watch) -> Figure:
    """Times the check that no weight changed."""
    name = f"looking at {num_weights} weights that did not change"
    watch(name, 0, 1)
    weights = [nn.Parameter(torch.ones(8, 8, device=settings.device)) for _ in range(num_weights)]
    call = CachedCall(
        _casts_of(weights, settings.dtype),
        (),
        owner="bench",
        verify="sample",
        compiled=lambda _: None,
    )
    timings = time_in_turns(
        {"look": lambda: call([*weights])}, repeats=settings.repeats, steps=settings.steps
    )
    return Figure(name, 1e6 * timings["look"].median, "µs")


def _casts_of(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> list[CachedValueSpec]:
    """Returns the specs of a cast of each weight."""
    prepare = Prepare({position: f"weight {position}" for position in range(len(weights))})
    casts = []
    for position, weight in enumerate(weights):
        cast = prepare.graph.call_function(CONVERT, (prepare.weight(position, weight), dtype))
        VALUE.put(cast, weight.detach().to(dtype))
        casts.append(cast)
    return prepare.specs(casts)


def _refresh(
    build: Callable[[], nn.Module], x: torch.Tensor, settings: Settings, watch: Watch
) -> Figure:
    """Times a call after a step, without a call with fresh values and without the copies.

    The graph has casts as inputs, as in training, because packed values are computed op by op.
    """
    with settings.device:
        model = build().eval()
    weights: list[torch.Tensor] = [weight.detach() for weight in model.parameters()]
    description = f"refresh of {len(weights)} weights after a step, beside the copying"
    watch(description, 0, 1)
    call = compiled(BY_NAME[UNFROZEN], model, (), settings)
    lows = [weight.to(settings.dtype) for weight in weights]
    # Call an op of optimizers instead of an optimizer, whose hooks may refresh before the timed
    # call.
    write = functools.partial(foreach_mul_, weights, 1.0)
    copy = functools.partial(foreach_copy_, lows, weights)
    run = functools.partial(call, x)
    runs = {STALE: run, FRESH: run, COPYING: copy}
    before = {STALE: write, FRESH: run, COPYING: write}
    with torch.no_grad():
        for name in [*runs] * WARM_UP_CALLS:  # the first calls compile
            before[name]()
            runs[name]()
        timings = time_in_turns(
            runs, repeats=ROUNDS_PER_REPEAT * settings.repeats, steps=1, before=before
        )
    torch.compiler.reset()
    rounds = zip(*(timings[name].times for name in (STALE, FRESH, COPYING)), strict=True)
    overhead = statistics.median(stale - fresh - copying for stale, fresh, copying in rounds)
    return Figure(description, 1e6 * overhead, "µs")
