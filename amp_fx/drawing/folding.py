"""Reduces graphs of boxes, so that pictures of large models are readable.

``fold_repeats`` folds repeated modules into one (``layers.0`` to ``layers.11`` become
``layers.0-11 x12``), ``collapse_modules`` draws closed modules as single boxes, and ``zoom``
restricts a graph to one module with its inputs and outputs.
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
    """Folds each run of consecutive equal modules of a list into one module.

    Modules are equal if their boxes are: ops, dtypes, shapes and inner modules, in order. Edges out
    of the last module start at the remaining one.

    Args:
        graph: The graph, which is not changed.

    Returns:
        The reduced graph, and the number of modules in each folded path.
    """
    graph = graph.copy()
    counts: dict[str, int] = {}
    while run := _first_run(graph):
        counts[_fold(graph, run)] = len(run)
    return graph, counts


def _first_run(graph: BoxGraph) -> list[str]:
    """Returns the outermost run of equal modules with consecutive numbers; empty if none exists."""
    lists = _numbered(graph)
    for parent in sorted(lists, key=lambda path: (path.count("."), path)):
        runs: list[list[str]] = []
        last: tuple[int, Any] | None = None
        for number in sorted(lists[parent]):
            path = join_path(parent, str(number))
            signature = _signature(graph, path)
            is_next = last is not None and last == (number - 1, signature)
            if is_next:
                runs[-1].append(path)
            else:
                runs.append([path])
            last = number, signature
        for run in runs:
            if len(run) > 1:
                return run
    return []


def _numbered(graph: BoxGraph) -> dict[str, set[int]]:
    """Returns the numbers of the modules in each list, by path of the list."""
    numbers: dict[str, set[int]] = {}
    for _, box in graph.nodes(data="box"):
        parts = box.module.split(".")
        for depth, part in enumerate(parts):
            if part.isdecimal():
                numbers.setdefault(".".join(parts[:depth]), set()).add(int(part))
    return numbers


def first_of_folded(path: str) -> str:
    """Returns the path of the first module in a folded path."""
    return re.sub(r"(?<![^.])(\d+)[-,][\d,-]+", r"\1", path)


def is_inside(module: str, path: str) -> bool:
    """Returns True if ``module`` is the module ``path`` or inside it."""
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
    remaining = _members(graph, run[0])
    inside = set(remaining)
    for path in run[1:]:
        others = _members(graph, path)
        inside.update(others)
        for name, counterpart in zip(others, remaining, strict=True):
            _rewire(graph, name, counterpart, inside)
            box = graph.nodes[counterpart]["box"]
            other = graph.nodes[name]["box"]
            shares = Counter(dict(box.shares)) + Counter(dict(other.shares))
            graph.nodes[counterpart]["box"] = dataclasses.replace(
                box, members=(*box.members, *other.members), shares=tuple(shares.items())
            )
    graph.remove_nodes_from(inside - set(remaining))
    for name in remaining:
        box = graph.nodes[name]["box"]
        module = new_path + box.module[len(run[0]) :]
        graph.nodes[name]["box"] = dataclasses.replace(box, module=module)
    return new_path


def _rewire(graph: BoxGraph, name: str, counterpart: str, inside: set[str]) -> None:
    """Moves the edges between a box and boxes outside of the run to its counterpart."""
    for source, _, data in list(graph.in_edges(name, data=True)):
        if source not in inside and not graph.has_edge(source, counterpart):
            graph.add_edge(source, counterpart, **data)
    for _, target, data in list(graph.out_edges(name, data=True)):
        if target not in inside and not graph.has_edge(counterpart, target):
            graph.add_edge(counterpart, target, **data)


MOST_BOXES = 28
"""Maximum number of boxes in a picture before no more modules are opened."""

LISTS = frozenset(("", "Sequential", "ModuleList", "ModuleDict"))
"""Container classes, which say nothing about their content."""


def choose_closed(
    modules: list[str], types: dict[str, str], root: str = "", most: int = MOST_BOXES
) -> list[str]:
    """Returns the modules to draw as closed boxes.

    Opens modules from the outside in, one depth at a time, while the number of boxes permits. If a
    whole depth has too many boxes, only opens folded modules. Modules without inner modules are
    never opened. A class that is open in one place and closed in another is closed everywhere: the
    blocks in the first stage of a ResNet, for example, should look like those of other stages.

    Args:
        modules: The module of each op, in order.
        types: Classes of modules by path.
        root: The module that is drawn.
        most: Maximum number of boxes before no more modules are opened.

    Returns:
        Paths of modules directly inside open modules.
    """
    closed_types: set[str] = set()
    while True:
        closed = _close(modules, types, root, most, closed_types)
        uneven = _uneven(modules, types, closed)
        if not uneven:
            return closed
        closed_types |= uneven


def _close(
    modules: list[str], types: dict[str, str], root: str, most: int, closed_types: set[str]
) -> list[str]:
    """Returns the modules to close, including all modules of ``closed_types``."""
    closed = _children(modules, root)
    num_boxes = _direct(modules, root) + len(closed)
    while True:
        inside = {path: _children(modules, path) for path in closed}
        openable = [path for path in closed if inside[path] and types.get(path) not in closed_types]
        opened = openable
        if num_boxes + _num_added(modules, opened) > most:
            opened = [path for path in openable if "-" in path]  # folded modules
        if not opened or num_boxes + _num_added(modules, opened) > most:
            return closed
        num_boxes += _num_added(modules, opened)
        closed = [path for path in closed if path not in opened]
        closed += [child for path in opened for child in inside[path]]


def _uneven(modules: list[str], types: dict[str, str], closed: list[str]) -> set[str]:
    """Returns the classes with open modules in one parent and only closed ones in another.

    Ignores modules inside closed modules, and modules nested in modules of the same class.
    """
    paths = {prefix for module in modules if module for prefix in _prefixes(module)}
    is_open: dict[str, dict[str, bool]] = {}
    for path in sorted(paths):
        kind, parent = types.get(path, ""), path.rpartition(".")[0]
        is_hidden = any(is_inside(parent, module) for module in closed) if parent else False
        is_nested = any(types.get(outer, "") == kind for outer in _prefixes(path)[:-1])
        if kind in LISTS or is_hidden or is_nested or not _children(modules, path):
            continue
        parents = is_open.setdefault(kind, {})
        parents[parent] = parents.get(parent, False) or path not in closed
    return {kind for kind, parents in is_open.items() if len(set(parents.values())) > 1}


def _prefixes(path: str) -> list[str]:
    """Returns the paths of a module and the modules around it, outermost first."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _num_added(modules: list[str], paths: list[str]) -> int:
    """Returns the number of boxes that opening modules adds."""
    return sum(_direct(modules, path) + len(_children(modules, path)) - 1 for path in paths)


def _children(modules: list[str], path: str) -> list[str]:
    """Returns the modules directly inside a module, in order."""
    prefix = f"{path}." if path else ""
    inside = [m[len(prefix) :] for m in modules if m.startswith(prefix) and m != path and m]
    return [prefix + name for name in dict.fromkeys(m.partition(".")[0] for m in inside)]


def _direct(modules: list[str], path: str) -> int:
    return sum(module == path for module in modules)


def zoom(graph: BoxGraph, focus: str) -> BoxGraph:
    """Returns the boxes of one module, with its inputs and outputs as small boxes."""
    inside = {name for name, box in graph.nodes(data="box") if is_inside(box.module, focus)}
    neighbors = {a for a, b in graph.edges if b in inside}
    neighbors |= {b for a, b in graph.edges if a in inside}
    result: BoxGraph = nx.DiGraph()
    for name, box in graph.nodes(data="box"):
        if name in inside:
            result.add_node(name, box=box)
        elif name in neighbors:
            result.add_node(name, box=_outside(box))
    result.add_edges_from(
        (a, b, data) for a, b, data in graph.edges(data=True) if a in inside or b in inside
    )
    return result


def _outside(box: Box) -> Box:
    lines = (f"in {box.module}",) if box.module else ()
    return Box("outside", box.title, lines, (), "", box.tooltip, box.members, ("outside",))


def has_module(graph: BoxGraph, focus: str) -> bool:
    """Returns True if a graph contains a box of a module."""
    return bool(focus) and any(is_inside(box.module, focus) for _, box in graph.nodes(data="box"))


def unknown_focus(graphs: Iterable[BoxGraph], focus: str) -> str:
    """Returns the error message for a module without boxes, with suggestions."""
    boxes = [box for graph in graphs for _, box in graph.nodes(data="box")]
    modules = {box.module for box in boxes if box.module}
    paths = {prefix for module in modules for prefix in _prefixes(module)}
    similar = difflib.get_close_matches(focus, sorted(paths), n=4, cutoff=0.4)
    suggestions = similar or sorted(paths, key=lambda path: (path.count("."), path))[:8]
    label = "similar names" if similar else "modules"
    hint = f"{label}: {', '.join(suggestions)}" if suggestions else "no modules"
    return f"focus={focus!r} is not a module with ops in the graph; {hint}"


def collapse_modules(
    graph: BoxGraph,
    types: dict[str, str],
    root: str = "",
    most: int = MOST_BOXES,
    repeats: dict[str, int] | None = None,
) -> BoxGraph:
    """Merges the boxes of each call of a closed module into one box.

    Ops that only move elements are part of their module, and are removed elsewhere.

    Args:
        graph: The graph, which is not changed.
        types: As for ``choose_closed``.
        root: As for ``choose_closed``.
        most: As for ``choose_closed``.
        repeats: Number of modules in each folded path.
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
    """Removes ops that only move elements between two other ops."""
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
    """Returns, for each box, its closed module and the number of that module's call, from 1.

    A call ends when an op outside of the module follows. A box outside of closed modules is mapped
    to itself and the number 0.
    """
    calls: dict[str, tuple[str, int]] = {}
    num_calls: dict[str, int] = {}
    current = ""
    for name, box in graph.nodes(data="box"):
        if box.kind in FEEDERS:
            continue
        path = next((path for path in closed if is_inside(box.module, path)), "")
        if box.is_move:  # does not separate calls
            calls[name] = (path, num_calls.get(path, 1)) if path else (name, 0)
            continue
        if path and path != current:
            num_calls[path] = num_calls.get(path, 0) + 1
        current = path
        calls[name] = (path, num_calls[path]) if path else (name, 0)
    for name, box in graph.nodes(data="box"):  # a cast belongs to the call that reads it
        if box.kind in FEEDERS:
            users = [calls[user] for user in graph.successors(name) if user in calls]
            inside = [user for user in users if user[1] and is_inside(box.module, user[0])]
            calls[name] = inside[0] if inside else (name, 0)
    return {name: calls[name] for name in graph}


FEEDERS = ("cast", "kept", "ghost")
"""Kinds of boxes that belong to the boxes that read them."""


def _module_box(path: str, boxes: list[Box], module_type: str, times: int) -> Box:
    """Returns the box of a closed module. Its counts refer to one of the ``times`` modules."""
    ops = [box for box in boxes if box.kind in ("op", "opaque")]
    counts: Counter[str] = Counter()
    for box in ops:
        counts.update(dict(box.shares))
    counts = Counter({dtype: count // times for dtype, count in counts.items()})
    floats = {dtype: count for dtype, count in counts.items() if dtype in COLORS}
    num_members: Counter[str] = Counter()
    for box in boxes:
        num_members[box.kind] += len(box.members)
    num_ops = (num_members["op"] + num_members["opaque"]) // times
    num_casts, num_kept = num_members["cast"] // times, num_members["kept"] // times
    lines = [module_type] if module_type else []
    if num_ops == 1:
        dtype = "".join(f" {SHORT.get(d, d)}" for d in counts)
        lines.append(f"{ops[0].title}{dtype}")
    elif ops:
        dtypes = ", ".join(f"{count} {SHORT.get(d, d)}" for d, count in counts.most_common())
        lines.append(f"{num_ops} ops: {dtypes}" if dtypes else f"{num_ops} ops")
    casts = []
    if num_casts:
        casts.append("1 cast" if num_casts == 1 else f"{num_casts} casts")
    if num_kept:
        casts.append(f"{num_kept} kept")
    if casts:
        lines.append(" + ".join(casts))
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
