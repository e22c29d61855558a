"""An explanation as a networkx graph, and questions that are asked of one.

``amp_fx.to_networkx`` is for whoever wants to ask their own; ours are ``cast_chains``,
``dtype_islands`` and ``longest_low_path``.
"""

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
"""A ``networkx.DiGraph`` as ``to_networkx`` gives it; networkx has no types."""

LOW = ("bfloat16", "float16")
_SOURCES = ("input", "weight", "output")


def to_networkx(explanation: Explanation | GraphRecord, *, graph: int | None = None) -> DiGraph:
    """The rewritten graphs as one ``networkx.DiGraph``.

    Nodes are named as in the explanation; where it has several graphs, with the graph's
    number in front (``"1.linear"``, ``"1.backward.mm"``). A node's attributes are ``kind``,
    ``op``, ``module``, ``dtype`` (what it runs in), ``policy``, ``origin``, ``reason``,
    ``file``, ``line``, ``flops`` and ``graph``; an edge's ``dtype``, ``shape`` and ``bytes``,
    of the tensor that flows. Casts have ``bytes_moved`` too.

    Args:
        explanation: What ``amp_fx.explain`` gave, or one of its graphs.
        graph: Only the graphs of this number; None takes all.

    Raises:
        UnsupportedError: There is no graph of this number.
    """
    graphs = _chosen(explanation, graph)
    network: DiGraph = nx.DiGraph()
    for record in graphs:
        stage = "backward." if record.stage == "backward" else ""
        _add(network, record, f"{record.index}.{stage}" if len(graphs) > 1 else "")
    return network


def _chosen(explanation: Explanation | GraphRecord, index: int | None) -> list[GraphRecord]:
    if isinstance(explanation, GraphRecord):
        return [explanation]
    if index is None:
        return list(explanation.graphs)
    found = [graph for graph in explanation.graphs if graph.index == index]
    if not found:
        last = len(explanation.forward) - 1
        raise UnsupportedError(f"graph={index}: the explanation has graphs 0 to {last}")
    return found


def _add(network: DiGraph, record: GraphRecord, prefix: str) -> None:
    moved = {cast.name: cast.bytes_moved for cast in record.casts}
    results = {node.name: node.outputs for node in record.nodes}
    for node in record.nodes:
        extra = {"bytes_moved": moved[node.name]} if node.kind in CASTS[:2] else {}
        network.add_node(prefix + node.name, graph=record.index, **_attributes(node), **extra)
    for node in record.nodes:
        for name in node.inputs:
            if name in results:
                network.add_edge(prefix + name, prefix + node.name, **_flow(results[name]))


def _attributes(node: NodeRecord) -> dict[str, Any]:
    names = ("kind", "op", "module", "dtype", "origin", "reason", "file", "line", "flops")
    policies = dict.fromkeys(decision.policy for decision in node.decisions)
    return {**{name: getattr(node, name) for name in names}, "policy": ", ".join(policies)}


def _flow(outputs: tuple[TensorRecord, ...]) -> dict[str, Any]:
    if not outputs:
        return {"dtype": "", "shape": (), "bytes": 0}
    first = outputs[0]
    return {
        "dtype": first.dtype,
        "shape": first.shape,
        "bytes": sum(tensor.num_bytes for tensor in outputs),
    }


def cast_chains(network: DiGraph) -> list[list[str]]:
    """Casts that follow each other with no op between; each is work that may be spared.

    Returns:
        The chains of two casts or more, each from the first cast to the last.
    """
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
    """Neighbouring ops that run in one dtype.

    Attributes:
        dtype: The dtype.
        nodes: Their names, in the order of the graph.
        flops: Their floating-point operations.
    """

    dtype: str
    nodes: tuple[str, ...]
    flops: int


def dtype_islands(network: DiGraph) -> list[DtypeIsland]:
    """Regions of ops that run in one dtype, the largest first."""
    ops = _ops(network)
    same = [(a, b) for a, b in ops.edges if ops.nodes[a]["dtype"] == ops.nodes[b]["dtype"]]
    alike = nx.Graph()
    alike.add_nodes_from(ops)
    alike.add_edges_from(same)
    order = {name: position for position, name in enumerate(network)}
    found = [sorted(group, key=order.__getitem__) for group in nx.connected_components(alike)]
    islands = [
        DtypeIsland(
            ops.nodes[group[0]]["dtype"],
            tuple(group),
            sum(ops.nodes[name]["flops"] for name in group),
        )
        for group in found
    ]
    return sorted(islands, key=lambda island: -len(island.nodes))


def longest_low_path(network: DiGraph) -> list[str]:
    """The longest way through ops that all run in a low dtype: no cast lies on it."""
    ops = _ops(network)
    low = _without(ops, [name for name, dtype in ops.nodes(data="dtype") if dtype not in LOW])
    return list(nx.dag_longest_path(low)) if low else []


def _ops(network: DiGraph) -> DiGraph:
    """The nodes that compute, with the ways between them that lead over no cast."""
    skipped: Iterable[str] = (*_SOURCES, *CASTS)
    return _without(network, [n for n, kind in network.nodes(data="kind") if kind in skipped])


def _without(network: DiGraph, names: Iterable[str]) -> DiGraph:
    """A copy without some nodes, the others in order: those of a subgraph are hashed."""
    result = network.copy()
    result.remove_nodes_from(names)
    return result
