"""Explanations as networkx graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import networkx as nx  # type: ignore[import-untyped]

from amp_fx.errors import UnsupportedError
from amp_fx.explanation.records import CASTS, GraphRecord

if TYPE_CHECKING:
    from amp_fx.explanation.explanation import Explanation
    from amp_fx.explanation.records import NodeRecord, TensorRecord

DiGraph: TypeAlias = Any
"""Result of ``to_networkx``, a ``networkx.DiGraph``; networkx has no types."""


def to_networkx(explanation: Explanation | GraphRecord, *, graph: int | None = None) -> DiGraph:
    """Converts the rewritten graphs to one ``networkx.DiGraph``.

    Nodes have the names of the explanation. If there are several graphs, names start with the
    number of the graph (``"1.linear"``, ``"1.backward.mm"``). Nodes have the attributes ``kind``,
    ``op``, ``module``, ``dtype`` (the compute dtype), ``policy``, ``origin``, ``reason``, ``file``,
    ``line`` and ``graph``; casts also have ``bytes_moved``. Edges have the ``dtype``,
    ``shape`` and ``bytes`` of their tensor.

    Args:
        explanation: Result of ``amp_fx.explain``, or one of its graphs.
        graph: Number of the graph to convert; None converts all graphs.

    Raises:
        UnsupportedError: No graph has this number.
    """
    graphs = graphs_of(explanation, graph)
    network: DiGraph = nx.DiGraph()
    for record in graphs:
        stage = "backward." if record.stage == "backward" else ""
        _add(network, record, f"{record.index}.{stage}" if len(graphs) > 1 else "")
    return network


def graphs_of(explanation: Explanation | GraphRecord, index: int | None) -> list[GraphRecord]:
    """Returns the graphs with a number, or all graphs.

    Raises:
        UnsupportedError: No graph has this number.
    """
    if isinstance(explanation, GraphRecord):
        return [explanation]
    if index is None:
        return list(explanation.graphs)
    graphs = [graph for graph in explanation.graphs if graph.index == index]
    if not graphs:
        last = len(explanation.forward) - 1
        raise UnsupportedError(f"graph={index}: the explanation has graphs 0 to {last}")
    return graphs


def _add(network: DiGraph, record: GraphRecord, prefix: str) -> None:
    bytes_moved = {cast.name: cast.bytes_moved for cast in record.casts}
    results = {node.name: node.outputs for node in record.nodes}
    for node in record.nodes:
        extra = {"bytes_moved": bytes_moved[node.name]} if node.kind in CASTS else {}
        network.add_node(prefix + node.name, graph=record.index, **_attributes(node), **extra)
    for node in record.nodes:
        for name in node.inputs:
            if name in results:
                attributes = _edge_attributes(results[name])
                network.add_edge(prefix + name, prefix + node.name, **attributes)


def _attributes(node: NodeRecord) -> dict[str, Any]:
    names = ("kind", "op", "module", "dtype", "origin", "reason", "file", "line")
    policies = dict.fromkeys(decision.policy for decision in node.decisions)
    return {**{name: getattr(node, name) for name in names}, "policy": ", ".join(policies)}


def _edge_attributes(outputs: tuple[TensorRecord, ...]) -> dict[str, Any]:
    if not outputs:
        return {"dtype": "", "shape": (), "bytes": 0}
    first = outputs[0]
    return {
        "dtype": first.dtype,
        "shape": first.shape,
        "bytes": sum(tensor.num_bytes for tensor in outputs),
    }
