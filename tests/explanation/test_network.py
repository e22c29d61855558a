"""The networkx graph and its queries, on graphs that were counted by hand."""

from __future__ import annotations

import networkx as nx  # type: ignore[import-untyped]
import pytest
import torch

import amp_fx
from amp_fx.errors import UnsupportedError
from tests.models.explained import mlp


def test_nodes_and_edges_carry_what_the_explanation_says() -> None:
    explanation = amp_fx.explain(mlp())(torch.randn(8, 16))
    network = amp_fx.to_networkx(explanation)
    assert nx.is_directed_acyclic_graph(network)
    assert set(network) == {node.name for node in explanation.nodes}
    linears = [data for _, data in network.nodes(data=True) if data["op"] == "aten.linear"]
    assert {data["policy"] for data in linears} == {"lower_precision_fp"}
    assert [data["module"] for data in linears] == ["0", "3"]
    [gelu] = [name for name, op in network.nodes(data="op") if op == "F.gelu"]
    [(_, _, flow)] = network.out_edges(gelu, data=True)
    assert flow == {"dtype": "bfloat16", "shape": (8, 64), "bytes": 8 * 64 * 2}
    moved = nx.get_node_attributes(network, "bytes_moved")
    assert sum(moved.values()) == explanation.totals.bytes_cast + explanation.totals.bytes_saved


def test_several_graphs_are_kept_apart() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x = x.relu()
        torch._dynamo.graph_break()
        return x.relu()

    explanation = amp_fx.explain(program)(torch.randn(4))
    both, second = amp_fx.to_networkx(explanation), amp_fx.to_networkx(explanation, graph=1)
    assert {name.partition(".")[0] for name in both} == {"0", "1"}
    assert nx.number_weakly_connected_components(both) == 2
    assert len(second) == len(both) - len(explanation.forward[0].nodes)
    with pytest.raises(UnsupportedError, match="graphs 0 to 1"):
        amp_fx.to_networkx(explanation, graph=2)
