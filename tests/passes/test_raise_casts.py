"""Narrowing casts stand in front of views; no number changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx, nn

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.passes.raise_casts import raise_casts
from tests.passes.test_narrow_gathers import LOW, Building, aten, prims

if TYPE_CHECKING:
    from collections.abc import Callable


def names(graph: fx.Graph) -> list[str]:
    return [getattr(node.target, "__name__", str(node.target)) for node in graph.nodes]


def raised(b: Building, *outputs: fx.Node) -> tuple[fx.GraphModule, int]:
    """The graph after the pass, checked, and the number of views that casts passed."""
    gm = b.done(*outputs)
    before = gm(*_numbers(gm))
    count = raise_casts(gm.graph)
    gm.graph.lint()
    gm.recompile()
    for ours, theirs in zip(gm(*_numbers(gm)), before, strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert str(b.value(node)) == str(node.meta["val"]), node
    assert raise_casts(gm.graph) == 0
    return gm, count


def _numbers(gm: fx.GraphModule) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return [torch.randn(t.shape, generator=generator).to(t.dtype) for t in inputs]


@pytest.mark.parametrize("how", ["aten", "prims"])
def test_a_cast_goes_in_front_of_views(how: str) -> None:
    b = Building()
    wide = b.op(aten.mul.Tensor, b.given("x", 4, 8), 2.0)
    rows = b.op(aten.permute.default, b.op(aten.view.default, wide, [2, 2, 8]), [0, 2, 1])
    cast = b.cast(rows) if how == "aten" else b.op(prims.convert_element_type.default, rows, LOW)
    gm, count = raised(b, cast)
    assert count == 2
    cast_name = "_to_copy.default" if how == "aten" else "convert_element_type.default"
    shown = ["x", "mul.Tensor", cast_name, "view.default", "permute.default", "output"]
    assert names(gm.graph) == shown


def test_a_copy_is_passed_and_a_wide_reader_of_the_source_stays() -> None:
    b = Building()
    x = b.given("x", 4, 8)
    gm, count = raised(b, b.cast(b.op(aten.clone.default, b.op(aten.t.default, x))), x)
    assert count == 2
    assert gm.graph.output_node().args[0][1].name == "x"  # type: ignore[index,union-attr]


def read_by_another(b: Building, x: fx.Node) -> list[fx.Node]:
    view = b.op(aten.view.default, x, [32])
    return [b.cast(view), b.op(aten.add.Tensor, view, 1.0)]


def of_a_part(b: Building, x: fx.Node) -> list[fx.Node]:
    return [b.cast(b.op(aten.select.int, x, 0, 1))]


def of_two(b: Building, x: fx.Node) -> list[fx.Node]:
    return [b.cast(b.op(aten.cat.default, [x, x]))]


def widened(b: Building, x: fx.Node) -> list[fx.Node]:
    return [b.cast(b.op(aten.view.default, x, [32]), torch.float64)]


def computed(b: Building, x: fx.Node) -> list[fx.Node]:
    return [b.cast(b.op(aten.relu.default, x))]


@pytest.mark.parametrize("make", [read_by_another, of_a_part, of_two, widened, computed])
def test_what_is_left_alone(make: Callable[[Building, fx.Node], list[fx.Node]]) -> None:
    b = Building()
    _, count = raised(b, *make(b, b.given("x", 4, 8)))
    assert count == 0


@pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")
def test_the_option_reaches_the_graphs_that_inductor_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, and the numbers are autocast's."""
    counts: list[int] = []

    def spy(graph: fx.Graph) -> int:
        counts.append(raise_casts(graph))
        return counts[-1]

    monkeypatch.setattr("amp_fx.backend.after_autograd.raise_casts", spy)
    block = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1))
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    options: dict[str, Any] = {"dtype": LOW, "raise_casts": True, "weight_cache": False}
    with torch._inductor.config.patch(fx_graph_cache=False):
        out = torch.compile(block, backend="amp_fx", options=options)(x)
        out.sum().backward()
    with torch.autocast("cpu", LOW):
        expected = block(x)
    assert len(counts) == 2
    assert torch.allclose(out, expected.float(), atol=0.05)
