"""What loss scaling adds to an optimizer's step: torch's scaler, ours, and a compiled step."""

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
    """A bare step, steps with the scaler of torch and with ours, and ours compiled."""
    turns = list(_turns(settings))
    for number, (optimizer, size, compiler) in enumerate(turns):
        name = f"{optimizer}, {size} parameters"
        watch(name, number, len(turns))
        with _one_thread(settings.device):
            timing = scaler.run(
                optimizer,
                size,
                repeats=ROUNDS_PER_REPEAT * settings.repeats,
                device=str(settings.device),
                compiler=compiler,
            )
        samples = timing.seconds.items()
        yield Comparison(name, tuple(Measured(who, Timing(tuple(s))) for who, s in samples))
        for who in timing.seconds:
            if who != scaler.BARE:
                yield Figure(f"{name}: {who} adds", 1e3 * timing.overhead(who), "ms")
        yield Figure(f"{name}: amp_fx adds, of what torch adds", 100 * timing.ratio, "%")
    if settings.device.type == "cuda":
        yield from _waits(settings)


def _turns(settings: Settings) -> Iterator[tuple[str, int, str | None]]:
    """Each optimizer, number of parameters, and what compiles the step, if anything does.

    Few parameters where something does: inductor takes most of a second for each.
    """
    for optimizer in scaler.OPTIMIZERS:
        if compiler := _compiler(optimizer, settings):
            yield optimizer, settings.pick(tiny=2, cpu=30), compiler
        yield optimizer, settings.pick(tiny=3, cpu=300), None
        yield optimizer, settings.pick(tiny=4, cpu=3000), None


def _waits(settings: Settings) -> Iterator[Figure]:
    """How often each makes the host wait."""
    for optimizer in scaler.OPTIMIZERS:
        waits = scaler.count_waits(optimizer, _compiler(optimizer, settings))
        for who, num_waits in waits.items():
            yield Figure(f"{optimizer}: {who} waits for the device", num_waits, "times a step")


def _compiler(optimizer: str, settings: Settings) -> str | None:
    """What compiles a step; nothing does where the compiled step is the eager one."""
    return None if optimizer in scaler.FUSED else settings.compiler


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
