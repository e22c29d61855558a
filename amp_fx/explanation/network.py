"""Explanations as networkx graphs, with some analyses of such graphs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

import networkx as nx  # type: ignore[import-untyped]

from amp_fx.errors import UnsupportedError
from amp_fx.explanation.records import GraphRecord
from amp_fx.explanation.table import CASTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amp_fx.explanation.explanation import Explanation
    from amp_fx.explanation.records import NodeRecord, TensorRecord

DiGraph: TypeAlias = Any
"""Result of ``to_networkx``, a ``networkx.DiGraph``; networkx has no types."""

LOW = ("bfloat16", "float16")
_SOURCES = ("input", "weight", "output")


def to_networkx(explanation: Explanation | GraphRecord, *, graph: int | None = None) -> DiGraph:
    """Converts the rewritten graphs to one ``networkx.DiGraph``.

    Nodes have the names of the explanation. If there are several graphs, names start with the
    number of the graph (``"1.linear"``, ``"1.backward.mm"``). Nodes have the attributes ``kind``,
    ``op``, ``module``, ``dtype`` (the compute dtype), ``policy``, ``origin``, ``reason``, ``file``,
    ``line``, ``flops`` and ``graph``; casts also have ``bytes_moved``. Edges have the ``dtype``,
    ``shape`` and ``bytes`` of their tensor.

    Args:
        explanation: Result of ``amp_fx.explain``, or one of its graphs.
        graph: Number of the graph to convert; None converts all graphs.

    Raises:
        UnsupportedError: No graph has this number.
    """
    graphs = _graphs_of(explanation, graph)
    network: DiGraph = nx.DiGraph()
    for record in graphs:
        stage = "backward." if record.stage == "backward" else ""
        _add(network, record, f"{record.index}.{stage}" if len(graphs) > 1 else "")
    return network


def _graphs_of(explanation: Explanation | GraphRecord, index: int | None) -> list[GraphRecord]:
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
    names = ("kind", "op", "module", "dtype", "origin", "reason", "file", "line", "flops")
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


def cast_chains(network: DiGraph) -> list[list[str]]:
    """Returns chains of two or more casts without an op between them, from first to last."""
    casts = network.subgraph([n for n, kind in network.nodes(data="kind") if kind == "cast"])
    starts = [name for name in casts if casts.in_degree(name) == 0 and casts.out_degree(name)]
    return [
        path
        for start in starts
        for end in sorted(nx.descendants(casts, start))
        if casts.out_degree(end) == 0
        for path in nx.all_simple_paths(casts, start, end)
    ]


@dataclasses.dataclass(frozen=True)
class DtypeIsland:
    """Connected ops with the same compute dtype.

    Attributes:
        dtype: The compute dtype.
        nodes: Names of the ops, in graph order.
        flops: Floating-point operations of the ops.
    """

    dtype: str
    nodes: tuple[str, ...]
    flops: int


def dtype_islands(network: DiGraph) -> list[DtypeIsland]:
    """Returns groups of connected ops with the same compute dtype, largest first."""
    ops = _ops(network)
    same_dtype = nx.Graph()
    same_dtype.add_nodes_from(ops)
    for a, b in ops.edges:
        if ops.nodes[a]["dtype"] == ops.nodes[b]["dtype"]:
            same_dtype.add_edge(a, b)
    order = {name: position for position, name in enumerate(network)}
    islands = []
    for component in nx.connected_components(same_dtype):
        names = tuple(sorted(component, key=order.__getitem__))
        flops = sum(ops.nodes[name]["flops"] for name in names)
        islands.append(DtypeIsland(ops.nodes[names[0]]["dtype"], names, flops))
    return sorted(islands, key=lambda island: -len(island.nodes))


def longest_low_path(network: DiGraph) -> list[str]:
    """Returns the longest path of ops that all run in a low dtype, without casts between them."""
    ops = _ops(network)
    low = _without(ops, [name for name, dtype in ops.nodes(data="dtype") if dtype not in LOW])
    return list(nx.dag_longest_path(low)) if low else []


def _ops(network: DiGraph) -> DiGraph:
    """Returns the graph without inputs, weights, outputs and casts."""
    removed: Iterable[str] = (*_SOURCES, *CASTS)
    return _without(network, [n for n, kind in network.nodes(data="kind") if kind in removed])


def _without(network: DiGraph, names: Iterable[str]) -> DiGraph:
    """Returns a copy without some nodes. Unlike a subgraph, the copy has the original order."""
    result = network.copy()
    result.remove_nodes_from(names)
    return result
