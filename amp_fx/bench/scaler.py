"""What loss scaling adds to an optimizer's step: ours, torch's, and none, on one optimizer.

Times ``step`` and ``update``. All take turns on one optimizer, in an order that changes from round
to round, with fresh gradients each time. What a scaler costs is the difference to the bare step of
the same round; the medians of that over all rounds are compared.

On the CPU it runs in one thread and counts that thread's own time: a scaler adds a millisecond to a
step of a hundred, less than what other programs on the machine add by taking turns with it.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.grad_scaler import GradScaler

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BARE, TORCH, AMP_FX, COMPILED = "bare", "torch", "amp_fx", "compiled step"

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=1e-3, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=1e-3, fused=True),
}
FUSED = tuple(name for name in OPTIMIZERS if name.endswith("fused"))
"""Those whose compiled step would be the eager one."""


@dataclasses.dataclass(frozen=True)
class ScalerTiming:
    """What a step took with each scaler."""

    seconds: dict[str, list[float]]

    def overhead(self, scaler: str) -> float:
        """Seconds that a scaler adds to the bare step of the same round."""
        pairs = zip(self.seconds[scaler], self.seconds[BARE], strict=True)
        return statistics.median(scaled - bare for scaled, bare in pairs)

    @property
    def ratio(self) -> float:
        """What amp_fx adds, as a share of what torch adds."""
        return self.overhead(AMP_FX) / self.overhead(TORCH)


class _Workload:
    """An optimizer and the scalers that step it: of several, each would lie elsewhere in memory."""

    def __init__(self, optimizer: str, num_params: int, numel: int, device: str) -> None:
        """Make parameters, and gradients to be scaled."""
        self._params: list[Tensor] = [
            torch.nn.Parameter(torch.randn(numel, device=device)) for _ in range(num_params)
        ]
        self._grads = [torch.randn(numel, device=device) for _ in range(num_params)]
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


def run(
    optimizer: str,
    num_params: int,
    *,
    numel: int = 256,
    repeats: int = 30,
    device: str = "cpu",
    compiler: str | None = None,
) -> ScalerTiming:
    """Time all scalers with one optimizer."""
    steps = _steps(optimizer, num_params, numel, device, compiler)
    order = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    rng = random.Random(0)
    for _ in range(repeats):
        rng.shuffle(order)
        for name in order:
            seconds[name].append(steps[name]())
    return ScalerTiming(seconds)


def count_waits(optimizer: str, compiler: str | None = None) -> dict[str, int]:
    """How often the host waits for the CUDA device in a step and an update, by scaler.

    The arguments are those of `run`.
    """
    steps = _steps(optimizer, 4, 256, "cuda", compiler)
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
    optimizer: str, num_params: int, numel: int, device: str, compiler: str | None
) -> dict[str, Callable[[], float]]:
    """Timed steps by scaler; the first, which make state and compile, have been taken."""
    steps = _Workload(optimizer, num_params, numel, device).scalers()
    if compiler is not None:
        steps[COMPILED] = _Workload(optimizer, num_params, numel, device).compiled(compiler)
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
