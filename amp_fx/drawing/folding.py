"""Shows less of a graph, so that a picture of a large model stays readable.

Repeated modules are folded into one (``layers.0`` to ``layers.11`` become ``layers.0-11 x12``),
modules are closed until the picture is small and even, and closed ones are drawn as single boxes.
Or one module is shown alone, with what it takes and gives.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import networkx as nx  # type: ignore[import-untyped]

from amp_fx.drawing.boxes import Box, connect
from amp_fx.drawing.dot import COLORS
from amp_fx.explanation.table import number_ranges
from amp_fx.policies.changes import join_path
from amp_fx.reports import SHORT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amp_fx.drawing.boxes import BoxGraph


def fold_repeats(graph: BoxGraph) -> tuple[BoxGraph, dict[str, int]]:
    """Leaves one of each run of neighbouring modules of a list that do the same.

    They are the same if their boxes are: ops, dtypes, shapes and the modules inside, in
    order. What leaves the last of them leaves the one that stays.

    Args:
        graph: The boxes; it is not changed.

    Returns:
        The smaller graph, and by the new paths of folded modules how many each stands for.
    """
    graph = graph.copy()
    counts: dict[str, int] = {}
    while run := _first_run(graph):
        counts[_fold(graph, run)] = len(run)
    return graph, counts


def _first_run(graph: BoxGraph) -> list[str]:
    """The outermost modules of a list that do the same, numbers following each other."""
    lists = _numbered(graph)
    for parent in sorted(lists, key=lambda path: (path.count("."), path)):
        runs: list[list[str]] = []
        last: tuple[int, Any] | None = None
        for number in sorted(lists[parent]):
            path = join_path(parent, str(number))
            signature = _signature(graph, path)
            is_next = last is not None and last == (number - 1, signature)
            runs = [*runs[:-1], [*runs[-1], path]] if is_next else [*runs, [path]]
            last = number, signature
        found = next((run for run in runs if len(run) > 1), [])
        if found:
            return found
    return []


def _numbered(graph: BoxGraph) -> dict[str, set[int]]:
    """By the path of a list of modules, the numbers in it."""
    found: dict[str, set[int]] = {}
    for _, box in graph.nodes(data="box"):
        parts = box.module.split(".")
        for depth, part in enumerate(parts):
            if part.isdecimal():
                found.setdefault(".".join(parts[:depth]), set()).add(int(part))
    return found


def first_of_folded(path: str) -> str:
    """Returns the path of the first of the modules that folded paths stand for."""
    return re.sub(r"(?<![^.])(\d+)[-,][\d,-]+", r"\1", path)


def is_inside(module: str, path: str) -> bool:
    """Returns True if a module is another one, or inside of it."""
    return not path or module == path or module.startswith(f"{path}.")


def _members(graph: BoxGraph, path: str) -> list[str]:
    return [name for name, box in graph.nodes(data="box") if is_inside(box.module, path)]


def _signature(graph: BoxGraph, path: str) -> tuple[Any, ...]:
    boxes = [graph.nodes[name]["box"] for name in _members(graph, path)]
    return tuple((box.module[len(path) :], box.signature) for box in boxes)


def _fold(graph: BoxGraph, run: list[str]) -> str:
    """Folds a run of modules into the first; returns its new path."""
    parent = run[0].rpartition(".")[0]
    numbers = number_ranges(int(path.rpartition(".")[2]) for path in run)
    new_path = join_path(parent, numbers)
    kept = _members(graph, run[0])
    inside = set(kept)
    for path in run[1:]:
        others = _members(graph, path)
        inside.update(others)
        counterpart = dict(zip(others, kept, strict=True))
        for name in others:
            _rewire(graph, name, counterpart[name], inside)
            box = graph.nodes[counterpart[name]]["box"]
            other = graph.nodes[name]["box"]
            shares = Counter(dict(box.shares)) + Counter(dict(other.shares))
            graph.nodes[counterpart[name]]["box"] = dataclasses.replace(
                box, members=(*box.members, *other.members), shares=tuple(shares.items())
            )
    graph.remove_nodes_from(inside - set(kept))
    for name in kept:
        box = graph.nodes[name]["box"]
        module = new_path + box.module[len(run[0]) :]
        graph.nodes[name]["box"] = dataclasses.replace(box, module=module)
    return new_path


def _rewire(graph: BoxGraph, name: str, counterpart: str, inside: set[str]) -> None:
    """Gives the edges between a box and what is outside of the run to its counterpart."""
    for source, _, data in list(graph.in_edges(name, data=True)):
        if source not in inside and not graph.has_edge(source, counterpart):
            graph.add_edge(source, counterpart, **data)
    for _, target, data in list(graph.out_edges(name, data=True)):
        if target not in inside and not graph.has_edge(counterpart, target):
            graph.add_edge(counterpart, target, **data)


MOST_BOXES = 28
"""How many boxes a picture may have before no more modules are opened."""

LISTS = frozenset(("", "Sequential", "ModuleList", "ModuleDict"))
"""Classes of modules that say nothing about what is inside."""


def choose_closed(
    modules: list[str], types: dict[str, str], root: str = "", most: int = MOST_BOXES
) -> list[str]:
    """The modules that stay closed.

    Modules are opened from the outside in, all of a depth together, as long as the picture
    stays small; where that is too much, those that stand for several. Those without modules
    inside stay closed. A class that is open in one place and closed in another is closed in
    both: the blocks of a ResNet's first stage differ from those of the others in nothing that
    a reader looks for.

    Args:
        modules: The module of each op, in order.
        types: Classes of modules by their paths.
        root: The module that the picture is of.
        most: How many boxes there may be before no more modules are opened.

    Returns:
        Paths of modules right inside of open ones.
    """
    shut: set[str] = set()
    while True:
        closed = _close(modules, types, root, most, shut)
        uneven = _uneven(modules, types, closed)
        if not uneven:
            return closed
        shut |= uneven


def _close(
    modules: list[str], types: dict[str, str], root: str, most: int, shut: set[str]
) -> list[str]:
    """The modules that stay closed, those of some classes at any rate."""
    closed = _children(modules, root)
    num_boxes = _direct(modules, root) + len(closed)
    while True:
        inside = {path: _children(modules, path) for path in closed}
        openable = [path for path in closed if inside[path] and types.get(path) not in shut]
        folded = [path for path in openable if "-" in path]
        fitting = next(
            (paths for paths in (openable, folded) if num_boxes + _more(modules, paths) <= most), []
        )
        if not fitting:
            return closed
        num_boxes += _more(modules, fitting)
        closed = [path for path in closed if path not in fitting]
        closed += [child for path in fitting for child in inside[path]]


def _uneven(modules: list[str], types: dict[str, str], closed: list[str]) -> set[str]:
    """Classes of which some module is open, while all of those in another place are closed.

    What is inside of a closed module is not seen, and a module inside of one of its own class
    is of no account.
    """
    paths = {".".join(m.split(".")[: i + 1]) for m in modules if m for i in range(m.count(".") + 1)}
    is_open: dict[str, dict[str, bool]] = {}
    for path in sorted(paths):
        kind, parent = types.get(path, ""), path.rpartition(".")[0]
        around = [".".join(path.split(".")[: i + 1]) for i in range(path.count("."))]
        is_hidden = any(is_inside(parent, shut) for shut in closed) if parent else False
        is_nested = any(types.get(outer, "") == kind for outer in around)
        if kind in LISTS or is_hidden or is_nested or not _children(modules, path):
            continue
        places = is_open.setdefault(kind, {})
        places[parent] = places.get(parent, False) or path not in closed
    return {kind for kind, places in is_open.items() if len(set(places.values())) > 1}


def _more(modules: list[str], paths: list[str]) -> int:
    """Counts the boxes that are added if some modules are opened."""
    return sum(_direct(modules, path) + len(_children(modules, path)) - 1 for path in paths)


def _children(modules: list[str], path: str) -> list[str]:
    """The modules right inside of one, in order."""
    prefix = f"{path}." if path else ""
    inside = [m[len(prefix) :] for m in modules if m.startswith(prefix) and m != path and m]
    return [prefix + name for name in dict.fromkeys(m.partition(".")[0] for m in inside)]


def _direct(modules: list[str], path: str) -> int:
    return sum(module == path for module in modules)


def zoom(graph: BoxGraph, focus: str) -> BoxGraph:
    """A graph of the boxes of one module; those outside that feed it or are fed by it shrink."""
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
    """Returns True if any box is in a module."""
    return bool(focus) and any(is_inside(box.module, focus) for _, box in graph.nodes(data="box"))


def unknown_focus(graphs: Iterable[BoxGraph], focus: str) -> str:
    """Describes that no box is in a module, and lists modules with similar names."""
    boxes = [box for graph in graphs for _, box in graph.nodes(data="box")]
    modules = {box.module for box in boxes if box.module}
    paths = {".".join(m.split(".")[: i + 1]) for m in modules for i in range(m.count(".") + 1)}
    near = difflib.get_close_matches(focus, sorted(paths), n=4, cutoff=0.4)
    known = near or sorted(paths, key=lambda path: (path.count("."), path))[:8]
    what = "similar names" if near else "modules"
    hint = f"{what}: {', '.join(known)}" if known else "no modules"
    return f"focus={focus!r} is not a module with ops in the graph; {hint}"


def collapse_modules(
    graph: BoxGraph,
    types: dict[str, str],
    root: str = "",
    most: int = MOST_BOXES,
    repeats: dict[str, int] | None = None,
) -> BoxGraph:
    """Merges the boxes of modules into one each; a module that is called twice gets two.

    Which stay closed is ``choose_closed``'s choice, which takes ``types``, ``root`` and ``most``.
    Ops that only move elements count, and are left out where they stand alone. ``repeats`` says, by
    the paths of folded modules, how many each stands for. The graph that is given does not change.
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
            connect(merged, a, b, **data)
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
            if target != sources[0]:
                connect(graph, sources[0], target, **graph.edges[name, target])
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
        path = next((path for path in closed if is_inside(box.module, path)), "")
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
