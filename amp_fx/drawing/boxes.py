"""Boxes and edges of a picture, made from an explained graph."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from amp_fx.explanation.records import CASTS
from amp_fx.explanation.table import bare_op
from amp_fx.graphs.locations import short_path
from amp_fx.reports import SHORT

if TYPE_CHECKING:
    from amp_fx.explanation.records import GraphRecord, NodeRecord, TensorRecord

MOVES = frozenset(
    (
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
    )
)
"""Ops that only move elements or change shapes. They have no boxes."""


@dataclasses.dataclass(frozen=True)
class Box:
    """One box.

    Attributes:
        kind: ``"op"``, ``"opaque"``, ``"input"``, ``"output"``, ``"module"`` (a closed module) or
            ``"outside"`` (next to the module that is shown).
        title: The text in bold.
        module: Path of the module in whose frame the box is drawn.
        lines: The text below the title.
        dtypes: The compute dtype of each of its ops.
        shapes: Dtypes and shapes of its results.
        ops: Names of the nodes that the box represents.
        casts: Names of the casts in front of its ops that are made in every call.
        cached: Names of the casts of its weights that are cached.
        tooltip: The text that is shown when the pointer is over the box.
    """

    kind: str
    title: str
    module: str = ""
    lines: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[TensorRecord, ...] = ()
    ops: tuple[str, ...] = ()
    casts: frozenset[str] = frozenset()
    cached: frozenset[str] = frozenset()
    tooltip: str = ""

    @property
    def signature(self) -> tuple[object, ...]:
        """A key that is equal for boxes that differ in their modules and names only."""
        shapes = [(tensor.dtype, tensor.shape) for tensor in self.shapes]
        numbers = len(self.casts), len(self.cached)
        return self.kind, self.title, self.dtypes, tuple(shapes), numbers


class Edge(NamedTuple):
    """One edge.

    Attributes:
        source: Name of a box.
        target: Name of a box.
        label: Dtype and shape of the tensor.
        cast: The dtype of the tensor before its cast, such as ``f32``; ``""`` without a cast.
    """

    source: str
    target: str
    label: str
    cast: str = ""


class Picture(NamedTuple):
    """Boxes by name, in the order of the graph, and edges."""

    boxes: dict[str, Box]
    edges: list[Edge]


def picture_of(record: GraphRecord, *, before: bool = False) -> Picture:
    """Returns the picture of an explained graph.

    Ops, inputs and outputs have boxes. Casts are on the edges. Casts of weights, which have no
    boxes, are in the boxes of their readers.

    Args:
        record: The graph.
        before: Whether to show the captured graph, without casts.
    """
    nodes = {node.name: node for node in (record.before if before else record.nodes)}
    read = {name for node in nodes.values() for name in node.inputs}
    picture = Picture({}, [])
    for node in nodes.values():
        is_unread = node.kind == "input" and (node.name not in read or not node.outputs)
        if node.kind == "weight" or is_unread or _is_passed_through(node, nodes):
            continue
        casts: set[str] = set()
        cached: set[str] = set()
        for name in node.inputs:
            source, passed = _source_of(name, nodes)
            casts |= {cast.name for cast in passed if cast.kind == "cast"}
            cached |= {cast.name for cast in passed if cast.kind != "cast"}
            if source in picture.boxes:
                cast = _short(nodes[source]) if passed else ""
                picture.edges.append(Edge(source, node.name, _label(nodes[name].outputs), cast))
        box = _box(node)
        picture.boxes[node.name] = dataclasses.replace(
            box,
            lines=(*box.lines, *(count_lines(len(casts), len(cached)) if box.ops else ())),
            casts=frozenset(casts),
            cached=frozenset(cached),
        )
    return picture


def count_lines(num_casts: int, num_cached: int) -> list[str]:
    """Returns the lines of a box on its casts and on its cached casts."""
    lines = {f"{num_casts} cast{'s' if num_casts > 1 else ''}": num_casts}
    lines[f"{num_cached} cached"] = num_cached
    return [line for line, number in lines.items() if number]


def _is_passed_through(node: NodeRecord, nodes: dict[str, NodeRecord]) -> bool:
    """Returns True for casts, and for ops that only move the elements of one tensor."""
    is_one_input = len(node.inputs) == 1 and node.inputs[0] in nodes
    return is_one_input and (node.kind in CASTS or (node.kind == "op" and _is_move(node)))


def _is_move(node: NodeRecord) -> bool:
    return bare_op(node.op) in MOVES


def _source_of(name: str, nodes: dict[str, NodeRecord]) -> tuple[str, list[NodeRecord]]:
    """Returns the box that a tensor comes from, and the casts in between."""
    casts = []
    while name in nodes and _is_passed_through(nodes[name], nodes):
        node = nodes[name]
        casts += [node] if node.kind in CASTS else []
        [name] = node.inputs
    return name, casts


def _short(node: NodeRecord) -> str:
    dtype = node.outputs[0].dtype if node.outputs else node.dtype
    return SHORT.get(dtype, dtype)


def _label(outputs: tuple[TensorRecord, ...]) -> str:
    """Returns the label of an edge, such as ``bf16 [2, 64]``."""
    if not outputs:
        return ""
    first = outputs[0]
    more = f" +{len(outputs) - 1}" if len(outputs) > 1 else ""
    return f"{SHORT.get(first.dtype, first.dtype)} [{', '.join(map(str, first.shape))}]{more}"


def _box(node: NodeRecord) -> Box:
    is_op = node.kind in ("op", "opaque")
    module = f"{node.module} ({node.module_type})" if node.module_type else node.module
    source = f"{short_path(node.file)}:{node.line}  {node.code}" if node.file else ""
    tooltip = dict.fromkeys((node.name, node.op, module, source, node.reason))
    return Box(
        kind=node.kind,
        title="output" if node.kind == "output" else bare_op(node.op) if is_op else node.op,
        module=node.module if is_op else "",
        lines=(SHORT.get(node.dtype, node.dtype),) if is_op and node.dtype else (),
        dtypes=(node.dtype,) if node.dtype else (),
        shapes=node.outputs,
        ops=(node.name,) if is_op else (),
        tooltip="\n".join(filter(None, tooltip)),
    )
