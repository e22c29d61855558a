"""What loss scaling adds to an optimizer's step; ``python -m amp_fx.bench.scaler`` has more."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from amp_fx.bench import scaler
from amp_fx.bench.compare import Comparison, Figure, Measured
from amp_fx.bench.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.bench.compare import Watch
    from amp_fx.bench.settings import Settings

ROUNDS_PER_REPEAT = 3
"""A round of the scalers is one step each, not a block of them."""


def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    """A bare step, and steps with the scaler of torch and with ours."""
    sizes = [settings.pick(tiny=2, cpu=300), settings.pick(tiny=4, cpu=3000)]
    turns = [(optimizer, size) for optimizer in scaler.OPTIMIZERS for size in sizes]
    for number, (optimizer, size) in enumerate(turns):
        name = f"{optimizer}, {size} parameters"
        watch(name, number, len(turns))
        with _one_thread(settings.device):
            [timing] = scaler.run(
                optimizers=[optimizer],
                num_params=[size],
                repeats=ROUNDS_PER_REPEAT * settings.repeats,
                device=str(settings.device),
            )
        samples = timing.seconds.items()
        yield Comparison(name, tuple(Measured(who, Timing(tuple(s))) for who, s in samples))
        for who in ("torch", "amp_fx"):
            yield Figure(f"{name}: {who} adds", 1e3 * timing.overhead(who), "ms")


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """On the CPU a thread's own time is counted, which leaves out those of other threads."""
    num_threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
