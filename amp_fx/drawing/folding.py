"""Folds repeated modules into one: ``layers.0`` to ``layers.11`` become ``layers.0-11 x12``."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from amp_fx.explanation.table import number_ranges

if TYPE_CHECKING:
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
            path = _join(parent, number)
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


def _join(parent: str, number: int) -> str:
    return f"{parent}.{number}" if parent else str(number)


def first_of_folded(path: str) -> str:
    """Returns the path of the first of the modules that folded paths stand for."""
    return re.sub(r"(?<![^.])(\d+)[-,][\d,-]+", r"\1", path)


def is_inside(module: str, path: str) -> bool:
    """Whether a module is another one, or inside of it."""
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
    new_path = f"{parent}.{numbers}" if parent else numbers
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
