"""Draws modules as single boxes, so that a large model stays readable."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import networkx as nx  # type: ignore[import-untyped]

from amp_fx.drawing.boxes import Box
from amp_fx.drawing.colors import COLORS
from amp_fx.drawing.folding import is_inside
from amp_fx.drawing.opening import MOST_BOXES, choose_closed
from amp_fx.explanation.table import SHORT

if TYPE_CHECKING:
    from amp_fx.drawing.boxes import BoxGraph


def collapse_modules(
    graph: BoxGraph,
    types: dict[str, str],
    root: str = "",
    most: int = MOST_BOXES,
    repeats: dict[str, int] | None = None,
) -> BoxGraph:
    """Merges the boxes of modules into one each; a module that is called twice gets two.

    Which stay closed is ``choose_closed``'s choice. Ops that only move elements count, and are
    left out where they stand alone.

    Args:
        graph: The boxes; it is not changed.
        types: Classes of modules by their paths.
        root: The module that the picture is of.
        most: How many boxes there may be before no more modules are opened.
        repeats: By the paths of folded modules, how many each stands for.
    """
    shown = without_moves(graph).nodes(data="box")
    modules = [box.module for _, box in shown if box.kind not in FEEDERS]
    owner = _calls(graph, choose_closed(modules, types, root, most))
    groups: dict[tuple[str, int], list[str]] = {}
    for name, call in owner.items():
        groups.setdefault(call, []).append(name)
    names = {call: f"{call[0]}#{call[1]}" if call[1] else call[0] for call in groups}
    merged: BoxGraph = nx.DiGraph()
    for call, members in groups.items():
        boxes = [graph.nodes[name]["box"] for name in members]
        is_module = call[1] > 0
        times = math.prod(n for path, n in (repeats or {}).items() if is_inside(call[0], path))
        box = _module_box(call[0], boxes, types.get(call[0], ""), times) if is_module else boxes[0]
        merged.add_node(names[call], box=box)
    for source, target, data in graph.edges(data=True):
        a, b = names[owner[source]], names[owner[target]]
        if a != b:
            labels = merged.edges[a, b]["labels"] if merged.has_edge(a, b) else ()
            labels = tuple(dict.fromkeys((*labels, *data["labels"])))
            merged.add_edge(a, b, labels=labels, is_ghost=data["is_ghost"])
    return without_moves(merged)


def without_moves(graph: BoxGraph) -> BoxGraph:
    """Leaves out ops that only move elements, where they stand between others."""
    graph = graph.copy()
    for name, box in list(graph.nodes(data="box")):
        if not box.is_move:
            continue
        sources, targets = list(graph.predecessors(name)), list(graph.successors(name))
        if len(sources) != 1 or not targets:
            continue
        for target in targets:
            if target == sources[0]:
                continue
            data = graph.edges[name, target]
            known = graph.get_edge_data(sources[0], target, {"labels": ()})["labels"]
            labels = tuple(dict.fromkeys((*known, *data["labels"])))
            graph.add_edge(sources[0], target, labels=labels, is_ghost=data["is_ghost"])
        graph.remove_node(name)
    return graph


def _calls(graph: BoxGraph, closed: list[str]) -> dict[str, tuple[str, int]]:
    """By box, the closed module that it is in and the number of that module's call, from 1.

    A call ends where something else is computed in between. A box that is in none stands
    for itself, with the number 0.
    """
    found: dict[str, tuple[str, int]] = {}
    number: dict[str, int] = {}
    current = ""
    for name, box in graph.nodes(data="box"):
        if box.kind in FEEDERS:
            continue
        path = _closed_around(box.module, closed)
        if box.is_move:  # says nothing about calls
            found[name] = (path, number.get(path, 1)) if path else (name, 0)
            continue
        if path and path != current:
            number[path] = number.get(path, 0) + 1
        current = path
        found[name] = (path, number[path]) if path else (name, 0)
    for name, box in graph.nodes(data="box"):  # a cast belongs to the call it is made for
        if box.kind in FEEDERS:
            users = [found[user] for user in graph.successors(name) if user in found]
            inside = [user for user in users if user[1] and is_inside(box.module, user[0])]
            found[name] = inside[0] if inside else (name, 0)
    return {name: found[name] for name in graph}


FEEDERS = ("cast", "kept", "ghost")
"""Kinds of boxes that only serve those they feed."""


def _closed_around(module: str, closed: list[str]) -> str:
    return next((path for path in closed if is_inside(module, path)), "")


def _module_box(path: str, boxes: list[Box], module_type: str, times: int) -> Box:
    """The box of a closed module; its numbers are those of one of the modules it stands for."""
    ops = [box for box in boxes if box.kind in ("op", "island")]
    counts: Counter[str] = Counter()
    for box in ops:
        counts.update(dict(box.shares))
    counts = Counter({dtype: count // times for dtype, count in counts.items()})
    floats = {dtype: count for dtype, count in counts.items() if dtype in COLORS}
    num_ops, num_casts, num_kept = (
        sum(len(box.members) for box in boxes if box.kind in kinds) // times
        for kinds in (("op", "island"), ("cast",), ("kept",))
    )
    lines = [module_type] if module_type else []
    if num_ops == 1:
        dtype = "".join(f" {SHORT.get(d, d)}" for d in counts)
        lines.append(f"{ops[0].title}{dtype}")
    elif ops:
        dtypes = ", ".join(f"{count} {SHORT.get(d, d)}" for d, count in counts.most_common())
        lines.append(f"{num_ops} ops" + f": {dtypes}" * bool(dtypes))
    casts = [f"{num_casts} cast" + "s" * (num_casts > 1)] if num_casts else []
    casts += [f"{num_kept} kept"] if num_kept else []
    lines += [" + ".join(casts)] if casts else []
    names = Counter(box.title for box in ops)
    listed = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in names.items())
    return Box(
        kind="module",
        title=path.rpartition(".")[2],
        lines=tuple(lines),
        shares=tuple((floats or counts).items()),
        module=path.rpartition(".")[0],
        tooltip=f"{path}\n{listed}" if listed else path,
        members=tuple(name for box in boxes for name in box.members),
        is_move=all(box.is_move for box in boxes),
    )
