"""MergeDuplicates: equal pure nodes become one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.passes.merge_duplicates import MergeDuplicates
from tests.weights.aot_graphs import text, traced

if TYPE_CHECKING:
    from collections.abc import Callable

BF16 = torch.bfloat16
X, W = torch.randn(4, 4), torch.randn(4, 4)


def twice(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w.to(BF16).float().t()) + (x @ w.to(BF16).float().t())


def test_golden() -> None:
    gm = traced(twice, W, X)
    assert MergeDuplicates().call(gm).counts == {"merged_nodes": 4}
    assert text(gm.graph) == [
        "w = placeholder",
        "x = placeholder",
        "_to_copy = aten._to_copy(w)",
        "_to_copy_1 = aten._to_copy(_to_copy)",
        "t = aten.t(_to_copy_1)",
        "mm = aten.mm(x, t)",
        "add = aten.add.Tensor(mm, mm)",
        "return add",
    ]
    gm.recompile()
    assert torch.equal(gm(W, X)[0], twice(W, X))
    assert not MergeDuplicates().call(gm).modified


@torch.library.custom_op("merge_duplicates_test::count", mutates_args=())
def count(x: torch.Tensor) -> torch.Tensor:
    """Nobody declared this op as pure: it may count its calls."""
    return x.clone()


@count.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


LEFT: dict[str, Callable[..., Any]] = {
    "other arguments": lambda w, x: w.to(BF16).float() + w.to(torch.float16) + x.sum(0) + x.sum(1),
    "random numbers": lambda w, x: torch.rand_like(w) + torch.rand_like(w) + x,
    "custom ops": lambda w, x: count(w) + count(w) + x,
    "writes": lambda w, x: x.add_(w) * x.add_(w),
    "returned": lambda w, x: (w + x, w + x),
    "one number throughout": lambda w, x: x + torch.full((4,), 1.0) + w + torch.full((4,), 1.0),
}


@pytest.mark.parametrize("program", LEFT.values(), ids=LEFT)
def test_left_alone(program: Callable[..., Any]) -> None:
    gm = traced(program, W, X)
    before = text(gm.graph)
    assert not MergeDuplicates().call(gm).modified
    assert text(gm.graph) == before
