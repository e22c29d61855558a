"""Boxes and edges of a picture, made from an explained graph."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, NamedTuple

from amp_fx.explanation.records import CASTS
from amp_fx.explanation.table import bare_op
from amp_fx.graphs.locations import short_path
from amp_fx.reports import SHORT

if TYPE_CHECKING:
    from amp_fx.explanation.records import GraphRecord, NodeRecord

Path = tuple[str, ...]
"""Levels of a module path: ``("layers.0", "attn")`` for ``layers.0.attn``."""

_LEVEL = re.compile(r"[^.\d][^.]*(?:\.\d+(?![^.]))?|[^.]+")
"""One level of a module path: a name with a number in its list, as in ``layers.0``."""


def levels(module: str) -> Path:
    """Returns the levels of a module path."""
    return tuple(_LEVEL.findall(module))


@dataclasses.dataclass(frozen=True)
class Box:
    """One box.

    Attributes:
        kind: ``"op"``, ``"opaque"``, ``"input"``, ``"output"``, ``"module"`` (a closed module) or
            ``"outside"`` (next to the module that is shown).
        title: The text in bold.
        path: Levels of the module in whose frame the box is drawn.
        lines: The text below the title.
        dtypes: The compute dtype of each of its ops.
        results: Dtypes and shapes of its results.
        ops: Names of the nodes that the box represents.
        casts: Names of the casts in front of its ops that are made in every call.
        cached: Names of the casts of its weights that are cached.
        tooltip: The text that is shown when the pointer is over the box.
    """

    kind: str
    title: str
    path: Path = ()
    lines: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    casts: frozenset[str] = frozenset()
    cached: frozenset[str] = frozenset()
    tooltip: str = ""

    def merged(self, other: Box) -> Box:
        """Returns a box for the ops of both, with the text of this one."""
        return dataclasses.replace(
            self,
            dtypes=self.dtypes + other.dtypes,
            ops=self.ops + other.ops,
            casts=self.casts | other.casts,
            cached=self.cached | other.cached,
        )


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
    """Boxes and edges.

    Attributes:
        boxes: The boxes by name, in the order of the graph.
        edges: The edges.
        types: Classes of modules by path.
        counts: Number of modules in each path that represents several.
    """

    boxes: dict[str, Box]
    edges: list[Edge]
    types: dict[Path, str]
    counts: dict[Path, int]


def picture_of(record: GraphRecord) -> Picture:
    """Returns the picture of an explained graph.

    Ops, inputs and outputs have boxes. Casts are on the edges. Casts of weights, which have no
    boxes, are in the boxes of their readers.
    """
    nodes = {node.name: node for node in record.nodes}
    read = {name for node in record.nodes for name in node.inputs}
    boxes: dict[str, Box] = {}
    edges = []
    for node in record.nodes:
        is_unread = node.kind == "input" and (node.name not in read or not node.outputs)
        if node.kind == "weight" or is_unread or _is_passed_through(node, nodes):
            continue
        casts: dict[str, set[str]] = {kind: set() for kind in CASTS}
        for name in node.inputs:
            source, passed = _source_of(name, nodes)
            for cast in passed:
                casts[cast.kind].add(cast.name)
            if source in boxes:
                before = _label(nodes[source]).partition(" ")[0] if passed else ""
                edges.append(Edge(source, node.name, _label(nodes[name]), before))
        boxes[node.name] = _box(node, *map(frozenset, casts.values()))
    types = {levels(module): kind for module, kind in record.modules}
    return Picture(boxes, edges, types, {})


def cast_line(num_casts: int, num_cached: int) -> str:
    """Returns the line of a box on its casts and on its cached casts."""
    casts = f"{num_casts} cast{'s' if num_casts > 1 else ''}"
    parts = {casts: num_casts, f"{num_cached} cached": num_cached}
    return ", ".join(part for part, number in parts.items() if number)


def _is_passed_through(node: NodeRecord, nodes: dict[str, NodeRecord]) -> bool:
    """Returns True for casts, and for views of one tensor. They have no boxes."""
    is_one_input = len(node.inputs) == 1 and node.inputs[0] in nodes
    return is_one_input and (node.kind in CASTS or node.is_view)


def _source_of(name: str, nodes: dict[str, NodeRecord]) -> tuple[str, list[NodeRecord]]:
    """Returns the box that a tensor comes from, and the casts in between."""
    casts = []
    while name in nodes and _is_passed_through(nodes[name], nodes):
        node = nodes[name]
        casts += [node] if node.kind in CASTS else []
        [name] = node.inputs
    return name, casts


def _label(node: NodeRecord) -> str:
    """Returns the label of an edge, such as ``bf16 [2, 64]``."""
    if not node.outputs:
        return ""
    first = node.outputs[0]
    more = f" +{len(node.outputs) - 1}" if len(node.outputs) > 1 else ""
    return f"{SHORT.get(first.dtype, first.dtype)} [{', '.join(map(str, first.shape))}]{more}"


def _box(node: NodeRecord, casts: frozenset[str], cached: frozenset[str]) -> Box:
    dtypes = (node.dtype,) if node.dtype else ()
    if node.kind not in ("op", "opaque"):
        title = "output" if node.kind == "output" else node.op
        return Box(node.kind, title, dtypes=dtypes, casts=casts, cached=cached)
    source = f"{short_path(node.file)}:{node.line}  {node.code}" if node.file else ""
    tooltip = (node.name, node.op, f"{node.module} {node.module_type}", source, node.reason)
    return Box(
        kind=node.kind,
        title=bare_op(node.op),
        path=levels(node.module),
        lines=(SHORT.get(node.dtype, node.dtype), cast_line(len(casts), len(cached))),
        dtypes=dtypes,
        results=tuple(f"{tensor.dtype} {tensor.shape}" for tensor in node.outputs),
        ops=(node.name,),
        casts=casts,
        cached=cached,
        tooltip="\n".join(filter(None, tooltip)),
    )
