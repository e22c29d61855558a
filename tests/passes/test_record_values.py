"""RecordValues: nodes that inductor adds without values get those that tracing records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx.graphs.bodies import graphs_in
from amp_fx.passes.record_values import RecordValues
from amp_fx.torch_private.pytree import tree_leaves
from tests.weights.aot_graphs import text, traced

if TYPE_CHECKING:
    from torch import fx

X, W = torch.randn(3, 4).t(), torch.randn(3, 5)


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A program with views, another dtype, several results of one op, and an op that writes."""
    values, places = torch.sort(x.to(torch.bfloat16) @ w.to(torch.bfloat16), dim=0)
    return values.t()[1:], places.add_(1), x.sum((0, 1))


def properties(graph: fx.Graph) -> dict[str, list[tuple[object, ...]]]:
    """Returns the dtype and layout of all tensors of each call."""
    return {
        node.name: [(t.dtype, t.shape, t.stride(), t.device) for t in tree_leaves(node.meta["val"])]
        for node in graph.nodes
        if node.op == "call_function"
    }


def test_golden() -> None:
    gm = traced(program, X, W)
    before, expected = text(gm.graph), properties(gm.graph)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    known = calls[0].meta["val"]
    for node in calls[1:]:
        del node.meta["val"]
    assert RecordValues().call(gm).counts == {"values_recorded": len(calls) - 1}
    assert text(gm.graph) == before
    assert properties(gm.graph) == expected
    assert calls[0].meta["val"] is known
    assert not RecordValues().call(gm).modified


def test_bodies_of_higher_order_ops() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(
            x.sum() > 0, lambda y: (y * 2).t().t(), lambda y: y - 1, (x,)
        )
        return result

    gm = make_fx(branches, tracing_mode="fake")(X)
    expected = [properties(graph) for graph in graphs_in(gm)]
    nodes = [node for graph in graphs_in(gm) for node in graph.nodes if node.name == "mul"]
    assert len(nodes) == 1
    del nodes[0].meta["val"]
    assert RecordValues().call(gm).counts == {"values_recorded": 1}
    assert [properties(graph) for graph in graphs_in(gm)] == expected


def test_constants_without_values_are_read_but_not_referred_to() -> None:
    """Packed weights are real tensors; a graph must not hold what is computed from them."""
    gm = traced(lambda x, w: x @ w, X, W)
    weight, product = gm.graph.find_nodes(op="placeholder")[1], list(gm.graph.nodes)[-2]
    gm.register_buffer("packed", W)
    with gm.graph.inserting_before(weight):
        constant = gm.graph.get_attr("packed")
    weight.replace_all_uses_with(constant)
    expected = properties(gm.graph)
    del product.meta["val"]
    RecordValues().call(gm)
    assert "val" not in constant.meta
    assert properties(gm.graph) == expected
    assert product.meta["val"].fake_mode is not None
