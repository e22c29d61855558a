"""Times contenders in turns, so that whatever else a machine does hits all of them alike.

``torch.utils.benchmark.Timer`` calls a statement twice before each measurement, which would triple
the time of steps that fill a block alone. So blocks are timed by ``timeit``, with torch's clock,
which waits for the accelerator, and the samples are torch's ``Measurement``.
"""

from __future__ import annotations

import contextlib
import random
import timeit
from typing import TYPE_CHECKING

import torch
from torch.utils import benchmark

from amp_fx.bench.other_process import OtherProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.utils.benchmark import Measurement

    from amp_fx.bench.contenders import Run

BLOCK_SECONDS = 0.05
"""How long a timed block takes at least: far above a clock's grain and a wake-up's cost."""
MAX_STEPS = 2000
WARM_UP_CALLS = 3
THREADS = (1, 2)
"""Numbers of threads with which inference is timed."""


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Runs kernels on so many threads. Inductor compiles its loops for that number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measurement(name: str, seconds: Sequence[float], steps: int = 1) -> Measurement:
    """Returns the samples of a contender as torch holds them.

    Args:
        name: The contender.
        seconds: Seconds of each block.
        steps: Calls in a block.
    """
    task = benchmark.TaskSpec(stmt=name, setup="")
    return benchmark.Measurement(steps, list(seconds), task)


def time_in_turns(
    runs: Mapping[str, Run],
    *,
    repeats: int,
    steps: int | None,
    on_round: Callable[[int], None] = lambda _: None,
    before: Mapping[str, Run] | None = None,
    clock: Callable[[], float] = benchmark.timer,
) -> dict[str, Measurement]:
    """Times every run, one block per round, in an order that changes from round to round.

    Args:
        runs: What to time; each has been called before.
        repeats: Rounds.
        steps: Calls per block; None for as many as last ``BLOCK_SECONDS``.
        on_round: Called with the number of the round that ended.
        before: What runs before each block, untimed, by the name of the run.
        clock: Gives seconds.

    Returns:
        The samples of each run.
    """
    before = before or {}
    num_steps = {name: steps or _steps_per_block(run, clock) for name, run in runs.items()}
    blocks: dict[str, timeit.Timer | OtherProcess] = {}
    for name, run in runs.items():
        if isinstance(run, OtherProcess):  # times itself
            blocks[name] = run
            continue
        # What ran before has taken the processor's caches: a block of several calls begins warm.
        warm = run if num_steps[name] > 1 else "pass"
        blocks[name] = timeit.Timer(run, before.get(name, warm), timer=clock)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    rng = random.Random(0)
    for number in range(1, repeats + 1):
        rng.shuffle(order)
        for name in order:
            samples[name].append(blocks[name].timeit(num_steps[name]))
        on_round(number)
    return {name: measurement(name, samples[name], num_steps[name]) for name in runs}


def _steps_per_block(run: Run, clock: Callable[[], float]) -> int:
    for _ in range(WARM_UP_CALLS):
        run()
    seconds = min(timeit.Timer(run, timer=clock).repeat(2, 1))
    return max(1, min(MAX_STEPS, round(BLOCK_SECONDS / seconds)))
