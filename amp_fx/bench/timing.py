"""Times contenders in turns, so that whatever else a machine does hits all of them alike."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import statistics
import time
from typing import TYPE_CHECKING

from amp_fx.demo.train import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from amp_fx.bench.contenders import Run

BLOCK_SECONDS = 0.05
"""How long a timed block takes at least: far above a clock's grain and a wake-up's cost."""
MAX_STEPS = 2000
WARM_UP_CALLS = 3


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call, one sample for each round."""

    seconds: tuple[float, ...]
    steps: int = 1

    @property
    def median(self) -> float:
        """The median sample."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile; of one sample, the sample."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, method="inclusive")
        return first, third

    @property
    def iqr(self) -> float:
        """The interquartile range."""
        first, third = self.quartiles
        return third - first


def time_in_turns(
    runs: Mapping[str, Run],
    *,
    repeats: int,
    steps: int | None,
    device: torch.device,
    on_round: Callable[[int], None] = lambda _: None,
    before: Mapping[str, Run] | None = None,
    clock: Callable[[], float] | None = None,
) -> dict[str, Timing]:
    """Times every run, one block per round, in an order that changes from round to round.

    Args:
        runs: What to time; each has been called before.
        repeats: Rounds.
        steps: Calls per block; None for as many as last ``BLOCK_SECONDS``.
        device: Waited for before and after each block.
        on_round: Called with the number of the round that ended.
        before: What runs before each block, untimed, by the name of the run.
        clock: Gives seconds; None for ``time.perf_counter``.

    Returns:
        The samples of each run.
    """
    before, clock = before or {}, clock or time.perf_counter
    num_steps = {name: steps or _steps_per_block(run, device, clock) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    rng = random.Random(0)
    with _quiet_collector():
        for number in range(1, repeats + 1):
            rng.shuffle(order)
            for name in order:
                if name in before:
                    before[name]()
                samples[name].append(_time_block(runs[name], num_steps[name], device, clock))
            on_round(number)
    return {name: Timing(tuple(samples[name]), num_steps[name]) for name in runs}


def _steps_per_block(run: Run, device: torch.device, clock: Callable[[], float]) -> int:
    for _ in range(WARM_UP_CALLS):
        run()
    seconds = min(_time_block(run, 1, device, clock) for _ in range(2))
    return max(1, min(MAX_STEPS, round(BLOCK_SECONDS / seconds)))


def _time_block(run: Run, steps: int, device: torch.device, clock: Callable[[], float]) -> float:
    if steps > 1:
        run()  # what ran before has taken the processor's caches
    wait_for(device)
    start = clock()
    for _ in range(steps):
        run()
    wait_for(device)
    return (clock() - start) / steps


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keeps Python's collector from walking all that compilation left behind."""
    was_frozen = gc.get_freeze_count() > 0  # by the program, for which it stays so
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
