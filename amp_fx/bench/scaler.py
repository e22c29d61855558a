"""``python -m amp_fx.bench.scaler``: what loss scaling adds to an optimizer's step.

Times ``step`` and ``update`` of `amp_fx.GradScaler` and of `torch.amp.GradScaler` beside the bare
``optimizer.step()``. All three take turns on one optimizer, in an order that changes from round
to round, with fresh gradients each time. What a scaler costs is the difference to the bare step of
the same round; the medians of that over all rounds are compared.

On the CPU it runs in one thread and counts that thread's own time: a scaler adds a millisecond to a
step of a hundred, less than what other programs on the machine add by taking turns with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from amp_fx.grad_scaler import GradScaler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

GOAL = 0.8
"""What amp_fx may cost at most, as a share of what torch's scaler costs."""

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=1e-3, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=1e-3, fused=True),
}
SCALERS: dict[str, Callable[[str], Any]] = {
    "bare": lambda device: GradScaler(device, enabled=False),
    "torch": torch.amp.GradScaler,
    "amp_fx": GradScaler,
}


@dataclasses.dataclass(frozen=True)
class ScalerTiming:
    """What a step took with each scaler.

    Attributes:
        optimizer: Which one, a key of `OPTIMIZERS`.
        num_params: How many parameters it has.
        seconds: Per scaler, a key of `SCALERS`, one sample for each round.
    """

    optimizer: str
    num_params: int
    seconds: dict[str, list[float]]

    def median(self, scaler: str) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds[scaler])

    def overhead(self, scaler: str) -> float:
        """Seconds that a scaler adds to the bare step of the same round."""
        pairs = zip(self.seconds[scaler], self.seconds["bare"], strict=True)
        return statistics.median(scaled - bare for scaled, bare in pairs)

    @property
    def ratio(self) -> float:
        """What amp_fx adds, as a share of what torch adds."""
        return self.overhead("amp_fx") / self.overhead("torch")


class _Workload:
    """One optimizer that all scalers step: of several, each would lie elsewhere in memory."""

    def __init__(self, optimizer: str, num_params: int, numel: int, device: str) -> None:
        """Take the first steps, in which state is made."""
        self._params: list[Tensor] = [
            torch.nn.Parameter(torch.randn(numel, device=device)) for _ in range(num_params)
        ]
        self._grads = [torch.randn(numel, device=device) for _ in range(num_params)]
        self._optimizer = OPTIMIZERS[optimizer](self._params)
        self._scalers = {name: make(device) for name, make in SCALERS.items()}
        self._device = device
        for name in [*SCALERS, *SCALERS]:
            self.time_step(name)

    def time_step(self, scaler_name: str) -> float:
        """Seconds of a step and an update with gradients as a backward pass leaves them."""
        scaler = self._scalers[scaler_name]
        scale = scaler.scale(torch.ones((), device=self._device))
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad * scale
        clock = _clock(self._device)
        start = clock()
        scaler.step(self._optimizer)
        scaler.update()
        return clock() - start


def run(
    *,
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    num_params: Sequence[int] = (300, 3000),
    numel: int = 256,
    repeats: int = 30,
    device: str = "cpu",
) -> list[ScalerTiming]:
    """Time all scalers with each optimizer and number of parameters.

    Args:
        optimizers: Keys of `OPTIMIZERS`.
        num_params: How many parameters.
        numel: Elements of each; many small ones show what a scaler does besides its arithmetic.
        repeats: Rounds.
        device: Where, such as "cpu" or "cuda".
    """
    return [
        _time(name, count, numel, repeats, device) for name in optimizers for count in num_params
    ]


def _time(optimizer: str, num_params: int, numel: int, repeats: int, device: str) -> ScalerTiming:
    workload = _Workload(optimizer, num_params, numel, device)
    order = list(SCALERS)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    rng = random.Random(0)
    for _ in range(repeats):
        rng.shuffle(order)
        for name in order:
            seconds[name].append(workload.time_step(name))
    return ScalerTiming(optimizer, num_params, seconds)


def _clock(device: str) -> Callable[[], float]:
    """Seconds; on a device, once it has done what it was given."""
    if torch.device(device).type == "cpu":
        return time.thread_time

    def wait_and_look() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return wait_and_look


def _table(timings: Sequence[ScalerTiming]) -> Table:
    table = Table("optimizer", "parameters", "bare", "+ torch", "+ amp_fx", "amp_fx / torch")
    for timing in timings:
        table.add_row(
            timing.optimizer,
            str(timing.num_params),
            f"{1e3 * timing.median('bare'):.2f} ms",
            f"{1e3 * timing.overhead('torch'):.2f} ms",
            f"{1e3 * timing.overhead('amp_fx'):.2f} ms",
            f"{timing.ratio:.2f}",
            style="" if timing.ratio <= GOAL else "red",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line.

    Returns:
        The exit code: 0 if the goal was met, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m amp_fx.bench.scaler", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--numel", type=int, default=256, help="elements of each parameter")
    parser.add_argument("--params", type=int, nargs="+", default=[300, 3000])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args(argv)
    if torch.device(args.device).type == "cpu":
        torch.set_num_threads(1)
    timings = run(
        num_params=args.params, numel=args.numel, repeats=args.repeats, device=args.device
    )
    console = Console()
    console.print(_table(timings))
    console.print(
        f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, "
        f"{args.numel} elements each; medians of {args.repeats} rounds or more; goal: {GOAL}"
    )
    return 0 if all(timing.ratio <= GOAL for timing in timings) else 1


if __name__ == "__main__":
    sys.exit(main())
