"""store_weights_low: weights become what all of their readers read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_fx.backend.pipeline import run_passes
from amp_fx.passes.store_weights_low import StoreWeightsLow
from tests.exporting.graphs import exported, with_casts
from tests.programs import graph_text


class Linear(nn.Module):
    """One weight that is read low, through a view too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(x, self.weight) @ self.weight.t()


def test_golden() -> None:
    gm = with_casts(exported(Linear(), torch.randn(2, 4)))
    [report] = run_passes(gm, [StoreWeightsLow((("p_weight",),))], check=True)
    assert report.counts == {"weights_stored_low": 1, "casts_removed": 2}
    assert graph_text(gm).splitlines() == [
        "graph(p_weight: bf16, x: f32)",
        "x_bf16: bf16 = aten._to_copy.default(x, dtype=torch.bfloat16)",
        "linear: bf16 = aten.linear.default(x_bf16, p_weight)",
        "t: bf16 = aten.t.default(p_weight)",
        "matmul: bf16 = aten.matmul.default(linear, t)",
        "return (matmul,)",
    ]
    assert not StoreWeightsLow((("p_weight",),)).call(gm).modified


class Other(Linear):
    """The weight is read in one more way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        if self.way == "float32":
            return (y + self.weight.sum(),)
        if self.way == "returned":
            return y, self.weight
        if self.way == "cast returned":
            return y, self.weight.bfloat16()
        if self.way == "written":
            self.weight.mul_(2)
            return (y,)
        if self.way == "another dtype":
            return y, self.weight.half() @ self.weight.half()
        return (y, x[:, :2] @ self.weight[:, ::2].mT)  # whose cast has other strides


WAYS = ("float32", "returned", "cast returned", "written", "another dtype", "other strides")


@pytest.mark.parametrize("way", WAYS)
def test_what_is_read_otherwise_stays(way: str) -> None:
    gm = with_casts(exported(Other(way), torch.randn(2, 4)))
    before = graph_text(gm)
    assert not StoreWeightsLow((("p_weight",),)).call(gm).modified
    assert graph_text(gm) == before


class Two(nn.Module):
    """Two weights, which may be one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.a, self.b.sum()


def test_of_one_storage_either_all_or_none() -> None:
    gm = with_casts(exported(Two(), torch.randn(2, 4)))
    assert not StoreWeightsLow((("p_a", "p_b"),)).call(gm).modified
    assert StoreWeightsLow((("p_a",), ("p_b",))).call(gm).counts["weights_stored_low"] == 1
