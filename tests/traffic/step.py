"""``python -m tests.traffic step``: counts what an optimizer's step reads and writes.

Nothing runs: code is generated for fake weights, as ``python -m tests.traffic bytes`` does for
models.
"""

from __future__ import annotations

import argparse
import json
import sys
import unittest.mock
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.errors import AmpFxError, OptionError
from amp_fx.grad_scaler import two_pass
from amp_fx.grad_scaler.two_pass import measure_of, numbers_of, stacked, update_of, work_of
from tests.traffic.counting import Counter
from tests.traffic.facts import versions
from tests.traffic.pretend import can_pretend, pretend_cuda

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SIZE = 1024

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(
        params, lr=1e-3, foreach=False, capturable=params[0].is_cuda
    ),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, foreach=False),
}


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: The arguments behind ``step``.

    Returns:
        The exit code: 0; 2 for an argument that is not usable.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.traffic step",
        description="Counts what the kernels of a step with clipping move, as inductor counts: "
        "bytes per float32 parameter. It takes a copy, which is only written, for read: 2 too "
        "many.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where it can be")
    parser.add_argument("--weights", type=int, default=4, help="how many; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parsed = parser.parse_args(list(argv))
    device = parsed.device or ("cuda" if can_pretend() else "cpu")
    try:
        if not has_cpp_compiler():
            raise OptionError("inductor finds no C++ compiler")
        if device == "cuda":
            pretend_cuda()
    except AmpFxError as error:
        sys.stderr.write(f"tests.traffic: {error}\n")
        return 2
    console = Console()
    facts = ", ".join(f"{name} {value}" for name, value in versions().items())
    console.print(f"{facts}, code for {device}", markup=False)
    found = {name: count(name, device, parsed.weights) for name in OPTIMIZERS}
    for name, rows in found.items():
        for row, (num_bytes, num_kernels) in rows.items():
            told = f"{name}, {row}: {num_bytes:.1f} bytes per parameter, {num_kernels} kernels"
            console.print(told, markup=False, highlight=False, soft_wrap=True)
    if parsed.json:
        parsed.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def count(name: str, device: str, num_weights: int) -> dict[str, tuple[float, int]]:
    """Counts one optimizer's step, compiled in several ways.

    Args:
        name: Of ``OPTIMIZERS``.
        device: ``"cpu"``, or ``"cuda"``, which must be pretended.
        num_weights: Of 1024 x 1024 elements each.

    Returns:
        By way, the bytes per parameter, and how many kernels there are; casts of weights that the
        next forward makes are bytes of the way that leaves them to it.
    """
    mode = FakeTensorMode()
    with mode, torch.device(device):
        weights = [torch.nn.Parameter(torch.empty(SIZE, SIZE)) for _ in range(num_weights)]
        for weight in weights:
            weight.grad = torch.empty(SIZE, SIZE)
        optimizer = OPTIMIZERS[name](weights)
        optimizer.step()  # which makes its state
    counted = _Counted(mode, optimizer, weights)
    return {
        "in two passes": counted.in_two_passes(num_copies=0),
        "in two passes, with a copy of each weight": counted.in_two_passes(num_copies=1),
        "in two passes, with a copy, without a scaler": counted.in_two_passes(1, has_scaler=False),
    }


class _Counted:
    """Generates the code of steps and adds up."""

    def __init__(self, mode: Any, optimizer: Any, weights: list[Any]) -> None:
        self._mode, self._optimizer, self._weights = mode, optimizer, weights
        self._device = weights[0].device

    def _of(self, function: Any, *args: Any) -> tuple[Any, float, int]:
        torch._dynamo.reset()
        counter = Counter(self._mode)
        with self._mode, counter.listening(), torch.no_grad():
            compiled: Any = torch.compile(function, backend=counter.inductor, dynamic=False)
            out = compiled(*args)
        kernels = [kernel for graph in counter.take() for kernel in graph.kernels]
        num_bytes = sum(kernel.num_bytes for kernel in kernels)
        return out, num_bytes / (len(self._weights) * SIZE * SIZE), len(kernels)

    def _scalar(self) -> Tensor:
        with self._mode:
            return torch.empty((), device=self._device)

    def in_two_passes(self, num_copies: int, *, has_scaler: bool = True) -> tuple[float, int]:
        """As ``PlainStep`` does, or with a scaler."""
        with unittest.mock.patch.object(two_pass, "_are_supported", return_value=True):  # fake, too
            work = work_of(self._optimizer)
        assert work is not None
        inv_scale = self._scalar() if has_scaler else None
        with self._mode:
            numbers = numbers_of(self._optimizer, work)
            counts = stacked(work.counts, numbers)
            lows = [[torch.empty_like(w, dtype=torch.bfloat16)] * num_copies for w in self._weights]
        measure, update = measure_of(work, 1.0, 2.0), update_of(work, write_grads=False)
        found, first, kernels = self._of(measure, work.grads, inv_scale, counts, numbers)
        found_inf, _, factor, scalars = found
        read = work.grads, scalars, inv_scale, factor, found_inf
        _, second, more = self._of(update, work.weights, lows, work.states, *read)
        return first + second, kernels + more
