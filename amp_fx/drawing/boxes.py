"""Boxes of pictures, and the conversion of explained graphs to graphs of boxes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

import networkx as nx  # type: ignore[import-untyped]

from amp_fx.explanation.table import CASTS, bare_op
from amp_fx.graphs.locations import short_path
from amp_fx.reports import SHORT

if TYPE_CHECKING:
    from amp_fx.explanation.records import CastRecord, GraphRecord, NodeRecord, TensorRecord

MOVES = frozenset(
    {
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "flatten",
        "unflatten",
        "contiguous",
        "transpose",
        "permute",
        "t",
        "mT",
        "T",
        "movedim",
        "swapaxes",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "getitem",
        "select",
        "narrow",
        "split",
        "chunk",
        "unbind",
    }
)
"""Ops that only move elements or change shapes."""

BoxGraph: TypeAlias = Any
"""A ``networkx.DiGraph``: nodes have ``box=Box``, edges ``labels=tuple`` and ``is_ghost``."""


@dataclasses.dataclass(frozen=True)
class Box:
    """One box.

    Attributes:
        kind: ``"op"``, ``"cast"``, ``"kept"``, ``"ghost"``, ``"opaque"``, ``"input"``,
            ``"output"``, ``"module"`` (a closed module) or ``"outside"``.
        title: The text in bold.
        lines: The text below the title.
        shares: The compute dtypes of its ops, each with the number of ops.
        module: Path of the module in whose frame the box is drawn.
        tooltip: The text that is shown when the pointer is over the box.
        members: Names of the nodes that the box represents.
        signature: Key that is equal for boxes that differ only in their modules.
        is_move: Whether its op only moves elements or changes shapes.
    """

    kind: str
    title: str
    lines: tuple[str, ...]
    shares: tuple[tuple[str, int], ...]
    module: str
    tooltip: str
    members: tuple[str, ...]
    signature: tuple[Any, ...] = ()
    is_move: bool = False


def boxes_of(record: GraphRecord, *, ghosts: bool = False, before: bool = False) -> BoxGraph:
    """Converts an explained graph to a graph of boxes.

    Weights have no boxes. Cached casts that feed the same op share a box.

    Args:
        record: The graph.
        ghosts: Whether removed casts have boxes.
        before: Whether to convert the captured graph, without casts.
    """
    by_name = {node.name: node for node in (record.before if before else record.nodes)}
    casts = () if before else record.casts
    weights = {cast.name: cast.weight for cast in casts if cast.weight}
    graph: BoxGraph = nx.DiGraph()
    homes = _homes(by_name)
    aliases: dict[str, str] = {}  # items of tuples, which have no boxes, with their tuples
    items: dict[str, list[NodeRecord]] = {}
    for node in by_name.values():
        if _is_item_of_tuple(node, by_name):
            items.setdefault(node.inputs[0], []).append(node)
            aliases[node.name] = aliases.get(node.inputs[0], node.inputs[0])
    for node in by_name.values():
        if node.name in homes:
            box = _box(node, homes[node.name], weights, items.get(node.name, []))
            graph.add_node(node.name, box=box)
    for node in by_name.values():
        for name in node.inputs if node.name in homes else ():
            source = aliases.get(name, name)
            if source in graph and source != node.name:
                connect(graph, source, node.name, (_tensor_label(by_name[name].outputs),))
    for cast in casts if ghosts else ():
        if cast.state == "removed":
            _add_ghost(graph, cast, by_name)
    _merge_kept(graph)
    return graph


def _merge_kept(graph: BoxGraph) -> None:
    """Merges the boxes of cached casts that feed the same op, such as its weight and bias."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, box in graph.nodes(data="box"):
        if box.kind == "kept":
            groups.setdefault((box.title, *graph.successors(name)), []).append(name)
    for names in groups.values():
        first, boxes = names[0], [graph.nodes[name]["box"] for name in names]
        weights = [box.lines[0] for box in boxes]
        graph.nodes[first]["box"] = dataclasses.replace(
            boxes[0],
            lines=(", ".join(dict.fromkeys(weights)), "kept"),
            tooltip="\n".join(box.tooltip for box in boxes),
            members=tuple(name for box in boxes for name in box.members),
            signature=tuple(box.signature for box in boxes),
        )
        for target in list(graph.successors(first)):
            labels = [label for name in names for label in graph.edges[name, target]["labels"]]
            graph.edges[first, target]["labels"] = tuple(dict.fromkeys(labels))
        graph.remove_nodes_from(names[1:])


def _homes(by_name: dict[str, NodeRecord]) -> dict[str, str]:
    """Returns the module in whose frame each node is drawn; casts are next to their users."""
    consumers: dict[str, list[NodeRecord]] = {}
    for node in by_name.values():
        for name in node.inputs:
            consumers.setdefault(name, []).append(node)
    homes = {}
    for node in by_name.values():
        if node.kind == "weight" or _is_item_of_tuple(node, by_name):
            continue
        users = consumers.get(node.name, [])
        if node.kind == "input" and not (users and node.outputs):
            continue
        is_output = bool(users) and users[0].kind == "output"
        homes[node.name] = (
            users[0].module if node.kind in CASTS and users and not is_output else node.module
        )
    return homes


def _is_item_of_tuple(node: NodeRecord, by_name: dict[str, NodeRecord]) -> bool:
    """Returns True if a node selects one of several results."""
    if bare_op(node.op) != "getitem" or len(node.inputs) != 1:
        return False
    source = by_name.get(node.inputs[0])
    return source is not None and len(source.outputs) > 1


def connect(
    graph: BoxGraph, source: str, target: str, labels: tuple[str, ...], *, is_ghost: bool = False
) -> None:
    """Adds an edge, or adds labels to an existing edge."""
    existing = graph.get_edge_data(source, target, {"labels": ()})["labels"]
    labels = tuple(dict.fromkeys((*existing, *labels)))
    graph.add_edge(source, target, labels=labels, is_ghost=is_ghost)


def _tensor_label(outputs: tuple[TensorRecord, ...]) -> str:
    """Returns the label of an edge, such as ``bf16 [2, 64]``."""
    if not outputs:
        return ""
    first = outputs[0]
    shape = ", ".join(map(str, first.shape))
    more = f" +{len(outputs) - 1}" if len(outputs) > 1 else ""
    return f"{SHORT.get(first.dtype, first.dtype)} [{shape}]{more}"


_KINDS = {"kept_cast": "kept"}


def _box(node: NodeRecord, home: str, weights: dict[str, str], items: list[NodeRecord]) -> Box:
    kind = _KINDS.get(node.kind, node.kind)
    dtype = SHORT.get(node.dtype, node.dtype)
    title, lines = bare_op(node.op), (dtype,) if dtype else ()
    if kind in ("cast", "kept"):
        weight = weights.get(node.name, "")
        title = f"to {SHORT.get(_result(node), _result(node))}"
        lines = (weight.rpartition(".")[2],) if weight else ()
    elif kind == "output":
        title, lines = "output", ()
    elif kind == "input":
        title, lines = node.op, ()
    shapes = tuple((tensor.dtype, tensor.shape) for tensor in node.outputs)
    return Box(
        kind=kind,
        title=title,
        lines=lines,
        shares=tuple(Counter(n.dtype for n in (node, *items) if n.dtype).items()),
        module=home,
        tooltip=_tooltip(node),
        members=(node.name, *(item.name for item in items)),
        signature=(kind, title, lines, node.dtype, shapes, len(items)),
        is_move=kind == "op" and title in MOVES,
    )


def _result(node: NodeRecord) -> str:
    return node.outputs[0].dtype if node.outputs else node.dtype


def _tooltip(node: NodeRecord) -> str:
    """Returns a description of a node in a few lines."""
    module = f"{node.module} ({node.module_type})" if node.module_type else node.module
    source = f"{short_path(node.file)}:{node.line}  {node.code}" if node.file else ""
    lines = (node.name, node.op, module, source, node.reason)
    return "\n".join(line for line in dict.fromkeys(lines) if line)


def _add_ghost(graph: BoxGraph, cast: CastRecord, by_name: dict[str, NodeRecord]) -> None:
    consumers = [name for name in cast.consumers if name in graph]
    home = by_name[consumers[0]].module if consumers else ""
    name = f"ghost.{cast.name}"
    title = f"to {SHORT.get(cast.to_dtype, cast.to_dtype)}"
    tooltip = f"{cast.name}: removed, {cast.removed_by}"
    box = Box("ghost", title, ("removed",), (), home, tooltip, (cast.name,), ("ghost", title))
    graph.add_node(name, box=box)
    if cast.source in graph:
        connect(graph, cast.source, name, (), is_ghost=True)
    for consumer in consumers:
        connect(graph, name, consumer, (), is_ghost=True)
