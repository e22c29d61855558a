"""Shows one module and what it takes and gives."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import networkx as nx  # type: ignore[import-untyped]

from amp_fx.drawing.boxes import Box
from amp_fx.drawing.folding import is_inside

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amp_fx.drawing.boxes import BoxGraph


def zoom(graph: BoxGraph, focus: str) -> BoxGraph:
    """The boxes of one module; those outside that feed it or are fed by it shrink.

    Args:
        graph: The boxes; it is not changed.
        focus: The module's path.
    """
    inside = {name for name, box in graph.nodes(data="box") if is_inside(box.module, focus)}
    near = {a for a, b in graph.edges if b in inside} | {b for a, b in graph.edges if a in inside}
    result: BoxGraph = nx.DiGraph()
    for name, box in graph.nodes(data="box"):
        if name in inside or name in near:
            result.add_node(name, box=box if name in inside else _outside(box))
    result.add_edges_from(
        (a, b, data) for a, b, data in graph.edges(data=True) if a in inside or b in inside
    )
    return result


def _outside(box: Box) -> Box:
    lines = (f"in {box.module}",) if box.module else ()
    return Box("outside", box.title, lines, (), "", box.tooltip, box.members, ("outside",))


def has_module(graph: BoxGraph, focus: str) -> bool:
    """Whether any box is in a module."""
    return bool(focus) and any(is_inside(box.module, focus) for _, box in graph.nodes(data="box"))


def unknown_focus(graphs: Iterable[BoxGraph], focus: str) -> str:
    """Says that no box is in a module, and which modules there are that are called alike."""
    boxes = [box for graph in graphs for _, box in graph.nodes(data="box")]
    modules = {box.module for box in boxes if box.module}
    paths = {".".join(m.split(".")[: i + 1]) for m in modules for i in range(m.count(".") + 1)}
    near = difflib.get_close_matches(focus, sorted(paths), n=4, cutoff=0.4)
    known = near or sorted(paths, key=lambda path: (path.count("."), path))[:8]
    hint = (
        f"{'similar names' if near else 'modules'}: {', '.join(known)}" if known else "no modules"
    )
    return f"focus={focus!r} is not a module with ops in the graph; {hint}"
