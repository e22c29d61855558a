"""Times contenders in turns, so that other load on the machine affects all of them alike.

Samples are torch's ``Measurement``. Blocks are timed by ``timeit`` with torch's clock, which waits
for the accelerator. ``torch.utils.benchmark.Timer`` would call a statement twice before each
measurement, which triples the time of blocks of one step.
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
"""The minimum duration of a timed block, far above the clock's resolution and wake-up times."""
MAX_STEPS = 2000
WARM_UP_CALLS = 3
THREADS = (1, 2)
"""Numbers of threads for timing inference."""


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Sets the number of threads of kernels. Inductor compiles loops for this number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measurement(name: str, seconds: Sequence[float], steps: int = 1) -> Measurement:
    """Converts samples to torch's ``Measurement``.

    Args:
        name: The name of the contender.
        seconds: Seconds of each block.
        steps: Number of calls in a block.
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
    """Times one block of every run per round, in a random order in each round.

    Args:
        runs: The runs to time; each must have been called before.
        repeats: Number of rounds.
        steps: Number of calls in a block; None for as many as take ``BLOCK_SECONDS``.
        on_round: Called with the number of each round after it.
        before: Functions that run before each block, untimed, by the name of the run.
        clock: Returns the time in seconds.

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
        # Other runs evict the processor's caches: blocks of several calls begin with a warm-up.
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
