"""checker: every invariant, broken on purpose, is named."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch

from amp_fx.backend.pipeline import captured_passes, run_passes
from amp_fx.graphs.casts import add_cast
from amp_fx.graphs.conditions import check_graph
from amp_fx.graphs.values import set_value
from tests.programs import POLICY, capture_program, site

if TYPE_CHECKING:
    from tests.programs import Captured


@pytest.fixture
def rewritten(rng: torch.Generator) -> Captured:
    x = torch.randn(4, 4, generator=rng)
    captured = capture_program(lambda x: (x @ x).relu().sum(), x)
    run_passes(captured.gm, captured_passes(POLICY, site(), restores_outputs=True), check=False)
    return captured


def fails(captured: Captured, message: str) -> None:
    with pytest.raises(AssertionError, match=f"^after a_pass: .*{message}"):
        check_graph(captured.gm, "a_pass")


def test_rewritten_graph_passes(rewritten: Captured) -> None:
    check_graph(rewritten.gm, "a_pass")


def test_graph_that_does_not_lint(rewritten: Captured) -> None:
    first, last = rewritten.node("x_bf16"), rewritten.node("sum")
    last.append(first)
    fails(rewritten, "does not lint")


@pytest.mark.parametrize("name", ["matmul", "relu", "x_bf16"])
def test_stale_dtype(rewritten: Captured, name: str) -> None:
    node = rewritten.node(name)
    set_value(node, node.meta["val"].float())
    fails(rewritten, "produces .*bfloat16.*contains .*float32")


def test_stale_rank(rewritten: Captured) -> None:
    node = rewritten.node("relu")
    set_value(node, node.meta["val"].flatten())
    fails(rewritten, "produces")


def test_cast_to_the_same_dtype(rewritten: Captured) -> None:
    node = rewritten.node("x_bf16")
    node.meta["cast"] = dataclasses.replace(node.meta["cast"], source_dtype=torch.bfloat16)
    fails(rewritten, "which is the dtype of")


def test_cast_of_a_cast(rewritten: Captured) -> None:
    inner, user = rewritten.node("x_bf16"), rewritten.node("matmul")
    with rewritten.gm.graph.inserting_before(user):
        outer = add_cast(rewritten.gm.graph, inner, torch.float16, "test")
    outer.meta["site"] = inner.meta["site"]
    set_value(outer, inner.meta["val"].half())
    fails(rewritten, "which is a cast")


def test_value_whose_shape_a_later_op_changes() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        z = y @ y
        y.unsqueeze_(0).transpose_(1, 2)
        return y @ z

    captured = capture_program(program, torch.randn(4, 4))
    run_passes(captured.gm, captured_passes(POLICY, site(), restores_outputs=True), check=True)
    node = captured.node("matmul")
    set_value(node, node.meta["val"].flatten())
    fails(captured, "produces")


def test_checking_writes_to_no_value() -> None:
    captured = capture_program(lambda x: x.clone().add_(1) @ x, torch.randn(4, 4))
    run_passes(captured.gm, captured_passes(POLICY, site(), restores_outputs=True), check=False)
    value = captured.node("clone").meta["val"]
    before = value._version
    check_graph(captured.gm, "a_pass")
    assert value._version == before
