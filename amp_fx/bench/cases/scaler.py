"""What loss scaling adds to an optimizer's step: ours, torch's, and none, on one optimizer.

Times ``step`` and ``update``. All take turns on one optimizer, in an order that changes from round
to round, with fresh gradients each time. What a scaler costs is the difference to the bare step of
the same round; the medians of that over all rounds are compared.

On the CPU it runs in one thread and counts that thread's own time: a scaler adds a millisecond to a
step of a hundred, less than what other programs on the machine add by taking turns with it.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.bench.compare import Comparison, Figure, Measured
from amp_fx.bench.timing import Timing
from amp_fx.grad_scaler import GradScaler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from amp_fx.bench.compare import Watch
    from amp_fx.bench.settings import Settings

BARE, TORCH, AMP_FX, COMPILED = "bare", "torch", "amp_fx", "compiled step"

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=1e-3, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=1e-3, fused=True),
}
FUSED = tuple(name for name in OPTIMIZERS if name.endswith("fused"))
"""Those whose compiled step would be the eager one."""

NUMEL = 256
"""Elements of each parameter."""

ROUNDS_PER_REPEAT = 3
"""A round of the scalers is one step each, not a block of them."""


def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    """A bare step, steps with the scaler of torch and with ours, and ours compiled."""
    turns = list(_turns(settings))
    for number, (optimizer, size, compiler) in enumerate(turns):
        name = f"{optimizer}, {size} parameters"
        watch(name, number, len(turns))
        with _one_thread(settings.device):
            steps = _steps(optimizer, size, str(settings.device), compiler)
            samples = _time(steps, ROUNDS_PER_REPEAT * settings.repeats)
        comparison = Comparison(name, tuple(Measured(who, Timing(s)) for who, s in samples.items()))
        yield comparison
        added = {who: _overhead(comparison, who) for who in samples if who != BARE}
        for who, seconds in added.items():
            yield Figure(f"{name}: {who} adds", 1e3 * seconds, "ms")
        share = 100 * added[AMP_FX] / added[TORCH]
        yield Figure(f"{name}: amp_fx adds, of what torch adds", share, "%")
    if settings.device.type == "cuda":
        yield from _waits(settings)


def _time(steps: dict[str, Callable[[], float]], repeats: int) -> dict[str, tuple[float, ...]]:
    """The seconds of each step, in an order that changes from round to round."""
    order = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    rng = random.Random(0)
    for _ in range(repeats):
        rng.shuffle(order)
        for name in order:
            seconds[name].append(steps[name]())
    return {name: tuple(samples) for name, samples in seconds.items()}


def _overhead(comparison: Comparison, scaler: str) -> float:
    """Seconds that a scaler adds to the bare step of the same round."""
    return statistics.median(scaled - bare for scaled, bare in comparison.rounds(scaler, BARE))


def _turns(settings: Settings) -> Iterator[tuple[str, int, str | None]]:
    """Each optimizer, number of parameters, and what compiles the step, if anything does.

    Few parameters where something does: inductor takes most of a second for each.
    """
    for optimizer in OPTIMIZERS:
        if compiler := _compiler(optimizer, settings):
            yield optimizer, settings.pick(tiny=2, cpu=30), compiler
        yield optimizer, settings.pick(tiny=3, cpu=300), None
        yield optimizer, settings.pick(tiny=4, cpu=3000), None


def _waits(settings: Settings) -> Iterator[Figure]:
    """How often each makes the host wait."""
    for optimizer in OPTIMIZERS:
        waits = count_waits(optimizer, _compiler(optimizer, settings))
        for who, num_waits in waits.items():
            yield Figure(f"{optimizer}: {who} waits for the device", num_waits, "times a step")


def _compiler(optimizer: str, settings: Settings) -> str | None:
    """What compiles a step; nothing does where the compiled step is the eager one."""
    return None if optimizer in FUSED else settings.compiler


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


class _Workload:
    """An optimizer and the scalers that step it: of several, each would lie elsewhere in memory."""

    def __init__(self, optimizer: str, num_params: int, device: str) -> None:
        """Make parameters, and gradients to be scaled."""
        self._params: list[Tensor] = [
            torch.nn.Parameter(torch.randn(NUMEL, device=device)) for _ in range(num_params)
        ]
        self._grads = [torch.randn(NUMEL, device=device) for _ in range(num_params)]
        self._optimizer = OPTIMIZERS[optimizer](self._params)
        self._device = device

    def scalers(self) -> dict[str, Callable[[], float]]:
        """A timed step with each of the scalers that can share an optimizer."""
        return {
            BARE: self._timed(GradScaler(self._device, enabled=False)),
            TORCH: self._timed(torch.amp.GradScaler(self._device)),
            AMP_FX: self._timed(GradScaler(self._device)),
        }

    def compiled(self, compiler: str) -> Callable[[], float]:
        """A timed compiled step, which on a device changes settings of the optimizer."""
        scaler = GradScaler(self._device)
        return self._timed(scaler, scaler.compile_step(self._optimizer, backend=compiler))

    def _timed(self, scaler: Any, step: Callable[[], Any] | None = None) -> Callable[[], float]:
        """Seconds of a step and an update with gradients as a backward pass leaves them."""
        clock = _clock(self._device)

        def step_and_update() -> None:
            scaler.step(self._optimizer)
            scaler.update()

        step = step or step_and_update

        def timed() -> float:
            scale = scaler.scale(torch.ones((), device=self._device))
            for param, grad in zip(self._params, self._grads, strict=True):
                param.grad = grad * scale
            start = clock()
            step()
            return clock() - start

        return timed


def count_waits(optimizer: str, compiler: str | None = None) -> dict[str, int]:
    """How often the host waits for the CUDA device in a step and an update, by scaler."""
    steps = _steps(optimizer, 4, "cuda", compiler)
    num_waits = {}
    before = torch.cuda.get_sync_debug_mode()
    for name, step in steps.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        num_waits[name] = sum("synchroniz" in str(warning.message) for warning in caught)
    return num_waits


def _steps(
    optimizer: str, num_params: int, device: str, compiler: str | None
) -> dict[str, Callable[[], float]]:
    """Timed steps by scaler; the first, which make state and compile, have been taken."""
    steps = _Workload(optimizer, num_params, device).scalers()
    if compiler is not None:
        steps[COMPILED] = _Workload(optimizer, num_params, device).compiled(compiler)
    for step in [*steps.values()] * 3:
        step()
    return steps


def _clock(device: str) -> Callable[[], float]:
    """Seconds; on a device, once it has done what it was given."""
    if torch.device(device).type == "cpu":
        return time.thread_time

    def wait_and_look() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return wait_and_look
