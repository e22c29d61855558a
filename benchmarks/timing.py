"""Times runs in turns, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import random
import timeit
from typing import TYPE_CHECKING

import torch
from torch.utils import benchmark

from benchmarks.other_process import OtherProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.utils.benchmark import Measurement

    from benchmarks.contenders import Run

BLOCK_SECONDS = 0.05
"""The minimum duration of a timed block, far above the clock's resolution and wake-up times."""
MAX_STEPS = 2000
WARM_UP_CALLS = 3


def time_in_turns(runs: Mapping[str, Run], *, repeats: int) -> dict[str, Measurement]:
    """Times one block of every run per round, in a random order in each round.

    Blocks are timed by ``timeit`` with torch's clock, which waits for the accelerator.
    ``benchmark.Timer`` would call a statement twice before each measurement, which triples the time
    of blocks of one step.

    Args:
        runs: The runs to time; each must have been called before.
        repeats: Number of rounds.

    Returns:
        The samples of each run.
    """
    num_steps = {name: _steps_per_block(run) for name, run in runs.items()}
    blocks: dict[str, timeit.Timer | OtherProcess] = {}
    for name, run in runs.items():
        # Other runs evict the processor's caches: blocks of several calls begin with a warm-up.
        warm_up = run if num_steps[name] > 1 else "pass"
        timer = timeit.Timer(run, warm_up, timer=benchmark.timer)
        blocks[name] = run if isinstance(run, OtherProcess) else timer  # the other times itself
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    rng = random.Random(0)
    for _ in range(repeats):
        rng.shuffle(order)
        for name in order:
            samples[name].append(blocks[name].timeit(num_steps[name]))
    tasks = {
        name: benchmark.TaskSpec(name, "", num_threads=torch.get_num_threads()) for name in runs
    }
    return {
        name: benchmark.Measurement(num_steps[name], samples[name], tasks[name]) for name in runs
    }


def _steps_per_block(run: Run) -> int:
    for _ in range(WARM_UP_CALLS):
        run()
    seconds = min(timeit.Timer(run, timer=benchmark.timer).repeat(2, 1))
    return max(1, min(MAX_STEPS, round(BLOCK_SECONDS / seconds)))
