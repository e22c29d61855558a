"""Integers that are rounded, losses that are not numbers, and search at the fault."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import amp_fx


class Rope(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.query, self.length = nn.Linear(16, 16), length

    def forward(self, x: Tensor) -> Tensor:
        frequencies = 100.0 ** -(torch.arange(0, 16, 2) / 16)
        angles = torch.arange(self.length).float()[:, None] @ frequencies[None]
        rotated: Tensor = self.query(x) * torch.cat([angles, angles], -1).cos()
        return rotated.square().mean()


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(257, "bfloat16"), (300, "bfloat16"), (2049, "float16"), (3000, "float16")],
)
def test_positions_that_a_product_rounds(length: int, dtype: str) -> None:
    torch.manual_seed(0)
    positions = torch.arange(length).float()
    are_exact = bool((positions.to(getattr(torch, dtype)).float() == positions).all())
    report = amp_fx.accuracy(Rope(length), dtype=dtype)(torch.randn(length, 16))
    found = [s for s in report.suspects if s.kind == "integers"]
    assert bool(found) is not are_exact
    if found:
        assert report.suspects[0] is found[0] or report.suspects[0].kind == "integers"
        assert (found[0].op, found[0].code.startswith("angles = ")) == ("matmul", True)
        assert f"up to {length - 1}" in found[0].why
        mended = amp_fx.accuracy(Rope(length), dtype=dtype, policy=report.mended())
        assert not [s for s in mended(torch.randn(length, 16)).suspects if s.kind == "integers"]


class Squares(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.inp, self.gate, self.out = nn.Linear(64, 64), Gate(), nn.Linear(64, 10)
        self.size = size

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(self.gate(self.inp(x) * self.size)), y)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).log1p()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(32, 64), torch.randint(10, (32,))


def test_search_names_the_op_at_fault() -> None:
    inputs = batch()
    result = amp_fx.search(Squares(1000), tolerance=2e-2, dtype="float16", compiler=None)(*inputs)
    assert "gate: pow" in map(str, result.units)
    assert result.value <= 2e-2
    tried = {e.units: e.is_enough for e in result.history}
    if not result.is_minimal:
        assert tried.get(("gate: pow",)) is not True
        assert any("gate: pow overflows" in note for note in result.notes)


class NotANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        cubes: Tensor = (300 * self.lin(x)).pow(3)
        return (cubes - cubes).sum()


def test_a_loss_that_is_not_a_number_has_no_error_of_the_gradients() -> None:
    torch.manual_seed(0)
    report = amp_fx.accuracy(NotANumber(), dtype="float16")(torch.randn(4, 8))
    assert report.loss is not None
    assert math.isnan(report.loss)
    assert "error of the gradients" not in str(report)
    assert "the loss is nan" in str(report)
