"""Products of a batch with one matrix: eager autocast and compiled code call the same kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.torch_version import TorchVersion

from tests.op_recorder import OpRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

PRODUCTS = tuple(f"aten.{name}." for name in ("mm", "addmm", "bmm", "baddbmm", "mv"))


FLATTENS_ONE_BATCH = TorchVersion(torch.__version__) >= "2.14"
"""Eager code of torch flattens a batch of one with any matrix; AOTAutograd does not."""


class Product(nn.Module):
    def __init__(self, compute: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.compute = compute
        self.weight, self.bias = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x, self.weight, self.bias)


ROWS = torch.randn(4, 8, 32)
LAYOUTS = {
    "even": ROWS,
    "transposed": torch.randn(4, 32, 8).transpose(1, 2),
    "batch second": torch.randn(8, 4, 32).transpose(0, 1),
    "every other": torch.randn(4, 8, 64)[..., ::2],
    "four dimensions": torch.randn(2, 8, 3, 32).transpose(1, 2),
    "one batch": torch.randn(1, 32, 8).transpose(1, 2),
}
PROGRAMS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "x @ weight": (lambda x, w, _: x @ w, (32, 48)),
    "weight @ x": (lambda x, w, _: w @ x.mT, (48, 32)),
    "x @ weight.t()": (lambda x, w, _: x @ w.t(), (48, 32)),
    "linear": (lambda x, w, _: linear(x, w), (48, 32)),
    "linear with a bias": (linear, (48, 32)),
    "x @ vector": (lambda x, w, _: x @ w, (32,)),
}


@pytest.mark.one_in(3)
@torch.no_grad()
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_kernels_and_bits_of_eager_autocast(program: str, compiler: str) -> None:
    """Eager autocast's cached copy of a weight requires gradients also while none are recorded."""
    differs = FLATTENS_ONE_BATCH and compiler == "aot_eager"
    for layout, x in LAYOUTS.items():
        if differs and layout == "one batch":
            continue
        for is_trained in (True, False):
            model = Product(*PROGRAMS[program]).requires_grad_(is_trained)
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="amp_fx", options={"compiler": compiler})
            with torch.autocast("cpu", torch.float16):
                compiled(x)
                with OpRecorder() as expected:
                    eager = model(x)
                with OpRecorder() as found:
                    result = compiled(x)
            assert products(found) == products(expected)
            assert torch.equal(result, eager)
            assert result.stride() == eager.stride()


def products(recorder: OpRecorder) -> list[str]:
    """Returns the products with the dtypes of their inputs, in order."""
    return [op for op in recorder.ops if op.startswith(PRODUCTS)]
