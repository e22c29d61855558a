"""Times an optimizer's step with the gradient scaler of amp_fx, with that of torch, and without.

Times ``step`` and ``update``. All contenders take turns on one optimizer, with new gradients each
time. The overhead of a scaler is the median over rounds of the difference from the bare step.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import benchmark

from amp_fx.bench.compare import Comparison, Figure, Measured
from amp_fx.bench.timing import time_in_turns
from amp_fx.grad_scaler import GradScaler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from amp_fx.bench.compare import Watch
    from amp_fx.bench.contenders import Run
    from amp_fx.bench.settings import Settings

BARE, TORCH, AMP_FX, COMPILED = "bare", "torch", "amp_fx", "compiled step"

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=1e-3, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=1e-3, fused=True),
}
FUSED = tuple(name for name in OPTIMIZERS if name.endswith("fused"))
"""Optimizers whose compiled step is the eager one."""

NUMEL = 256
"""Number of elements of each parameter."""

ROUNDS_PER_REPEAT = 3
"""Rounds per repeat. A round is one step of each scaler."""


def run(settings: Settings, watch: Watch) -> Iterator[Comparison | Figure]:
    """Times bare steps, steps with torch's scaler and with amp_fx's, and compiled steps."""
    turns = list(_turns(settings))
    for number, (optimizer, size, compiler) in enumerate(turns):
        name = f"{optimizer}, {size} parameters"
        watch(name, number, len(turns))
        with _one_thread(settings.device):
            steps, before = _steps(optimizer, size, str(settings.device), compiler)
            timings = time_in_turns(
                steps,
                repeats=ROUNDS_PER_REPEAT * settings.repeats,
                steps=1,
                before=before,
                clock=time.thread_time if settings.device.type == "cpu" else benchmark.timer,
            )
        comparison = Comparison(name, tuple(Measured(*timed) for timed in timings.items()))
        yield comparison
        added: dict[str, float] = {}
        for scaler in [name for name in timings if name != BARE]:
            rounds = comparison.rounds(scaler, BARE)
            added[scaler] = statistics.median(scaled - bare for scaled, bare in rounds)
            yield Figure(f"{name}: {scaler} adds", 1e3 * added[scaler], "ms")
        share = 100 * added[AMP_FX] / added[TORCH]
        yield Figure(f"{name}: amp_fx adds, of what torch adds", share, "%")
    for optimizer in OPTIMIZERS if settings.device.type == "cuda" else ():
        for scaler, num_waits in count_waits(optimizer, _compiler(optimizer, settings)).items():
            yield Figure(f"{optimizer}: {scaler} waits for the device", num_waits, "times a step")


def _turns(settings: Settings) -> Iterator[tuple[str, int, str | None]]:
    """Yields optimizers, numbers of parameters, and the compiler of the step, or None.

    Compiled steps have few parameters, because inductor takes almost a second for each.
    """
    for optimizer in OPTIMIZERS:
        if compiler := _compiler(optimizer, settings):
            yield optimizer, settings.pick(tiny=2, cpu=30), compiler
        yield optimizer, settings.pick(tiny=3, cpu=300), None
        yield optimizer, settings.pick(tiny=4, cpu=3000), None


def _compiler(optimizer: str, settings: Settings) -> str | None:
    """Returns the compiler of a step, or None if the compiled step is the eager one."""
    return None if optimizer in FUSED else settings.compiler


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Uses one thread on the CPU, where only the time of the calling thread is measured.

    A scaler adds a millisecond to a step of a hundred, less than the noise of other programs.
    """
    num_threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class _SharedOptimizer:
    """An optimizer that scalers step in turn, so that its memory has the same addresses for all."""

    def __init__(self, optimizer: str, num_params: int, device: str) -> None:
        self._params: list[Tensor] = [
            torch.nn.Parameter(torch.randn(NUMEL, device=device)) for _ in range(num_params)
        ]
        self._grads = [torch.randn(NUMEL, device=device) for _ in range(num_params)]
        self.optimizer = OPTIMIZERS[optimizer](self._params)

    def give_gradients(self, scaler: Any) -> None:
        """Sets the gradients of a backward pass of the scaled loss."""
        scale = scaler.scale(torch.ones((), device=self._grads[0].device))
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad * scale

    def step_and_update(self, scaler: Any) -> None:
        """Calls ``step`` and ``update`` of a scaler."""
        scaler.step(self.optimizer)
        scaler.update()


def count_waits(optimizer: str, compiler: str | None = None) -> dict[str, int]:
    """Returns the number of device synchronizations in a step and an update, by scaler."""
    steps, prepare = _steps(optimizer, 4, "cuda", compiler)
    num_waits = {}
    before = torch.cuda.get_sync_debug_mode()
    for name, step in steps.items():
        prepare[name]()
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
) -> tuple[dict[str, Run], dict[str, Run]]:
    """Returns functions that step and update by scaler, and functions that set their gradients.

    The first steps, which initialize state and compile, have run. A compiled step has its own
    optimizer, because it changes settings of the optimizer on an accelerator.
    """
    scalers: dict[str, Any] = {
        BARE: GradScaler(device, enabled=False),
        TORCH: torch.amp.GradScaler(device),
        AMP_FX: GradScaler(device),
    }
    shared = _SharedOptimizer(optimizer, num_params, device)
    steps: dict[str, Run] = {}
    before: dict[str, Run] = {}
    for name, scaler in scalers.items():
        steps[name] = functools.partial(shared.step_and_update, scaler)
        before[name] = functools.partial(shared.give_gradients, scaler)
    if compiler is not None:
        scaler, separate = GradScaler(device), _SharedOptimizer(optimizer, num_params, device)
        steps[COMPILED] = scaler.compile_step(separate.optimizer, backend=compiler)
        before[COMPILED] = functools.partial(separate.give_gradients, scaler)
    for name in [*steps] * 3:
        before[name]()
        steps[name]()
    return steps, before
