"""Which boxes of a picture stand in which frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

import networkx as nx  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from amp_fx.drawing.boxes import Box
    from amp_fx.drawing.edges import Stream

Frames = dict[str, dict[str, "Box"]]
"""By the path of a module right inside of another, the boxes in it by name."""


def frames_in(boxes: dict[str, Box], streams: list[Stream], path: str) -> Frames:
    """The frames right inside of the frame of a module; a box of one alone needs none.

    A list of modules whose members take turns with those of another list is left and entered
    again: its frame would hold together what is computed far apart, and arrows would go up. Such
    modules get a frame each instead.

    Args:
        boxes: What is in the frame, by name.
        streams: What goes between boxes.
        path: The module of the frame; its own boxes are in none of those inside.
    """
    frames: Frames = {}
    for name, box in boxes.items():
        if box.module != path:
            frames.setdefault(_child(path, box.module), {})[name] = box
    while torn := _first_torn(frames, streams):
        members = frames.pop(torn)
        for name, box in members.items():
            inner = name if box.module == torn else _child(torn, box.module)
            frames.setdefault(inner, {})[name] = box
    return {
        child if len(found) == 1 else _only_inside(child, found): found
        for child, found in frames.items()
    }


def _first_torn(frames: Frames, streams: list[Stream]) -> str:
    """A frame of several modules that arrows leave and come back to."""
    owner = {name: path for path, found in frames.items() for name in found}
    between = nx.DiGraph()
    for stream in streams:
        a = owner.get(stream.source, f"box {stream.source}")
        for target in stream.targets:
            b = owner.get(target, f"box {target}")
            if a != b:
                between.add_edge(a, b)
    for path, found in frames.items():
        is_list = all(box.module != path or box.kind == "module" for box in found.values())
        if len(found) > 1 and is_list and path in between and _is_in_cycle(between, path):
            return path
    return ""


def _is_in_cycle(graph: nx.DiGraph, node: str) -> bool:
    return any(nx.has_path(graph, after, node) for after in graph.successors(node))


def _child(path: str, module: str) -> str:
    """The module right inside of one that leads to another."""
    start = len(path) + 1 if path else 0
    return module[:start] + module[start:].partition(".")[0]


def _only_inside(path: str, boxes: dict[str, Box]) -> str:
    """A module, or the one in it that has all of its boxes: one frame does for both."""
    inside = {box.module for box in boxes.values()}
    while path not in inside and len(inner := {_child(path, m) for m in inside}) == 1:
        [path] = inner
    return path
