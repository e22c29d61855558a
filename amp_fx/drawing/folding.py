"""Makes pictures of large models readable: repeated modules are one, deep modules are closed.

Equal consecutive modules of a list become one (``layers.0`` to ``layers.11`` become
``layers.0-11``, drawn with ``x 12``). Modules at a given depth become closed boxes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from amp_fx.drawing.boxes import Box, Path, Picture, cast_line
from amp_fx.explanation.table import number_ranges
from amp_fx.reports import SHORT

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_BOXES = 20
"""Maximum number of boxes of a picture whose depth the caller does not choose."""

FLOATS = frozenset(("bfloat16", "float16", "float32", "float64"))

_IN_LIST = re.compile(r"(|.*\.)(\d+)")
"""A level that is a member of a list: the list and the number."""


def fold_repeats(picture: Picture) -> Picture:
    """Makes each run of equal consecutive modules of a list one module.

    Modules are equal if their boxes are, in order. Edges between two of them are dropped; edges out
    of the last one start at the remaining one.
    """
    while run := _first_run(picture.boxes.values()):
        start = len(run[0])
        numbers = number_ranges(int(path[-1].rpartition(".")[2]) for path in run)
        folded = (*run[0][:-1], re.sub(r"\d+$", numbers, run[0][-1]))
        copies = [[n for n, box in picture.boxes.items() if box.path[:start] == p] for p in run]
        first = {name: kept for copy in copies for name, kept in zip(copy, copies[0], strict=True)}
        index = {name: i for i, copy in enumerate(copies) for name in copy}
        boxes: dict[str, Box] = {}
        for name, box in picture.boxes.items():
            kept = first.get(name, name)
            if kept in boxes:
                boxes[kept] = boxes[kept].merged(box)
            else:
                path = folded + box.path[start:] if name in first else box.path
                boxes[name] = dataclasses.replace(box, path=path)
        edges = [
            edge._replace(
                source=first.get(edge.source, edge.source),
                target=first.get(edge.target, edge.target),
            )
            for edge in picture.edges
            if len({index[name] for name in edge[:2] if name in index}) < 2
        ]
        types = {
            folded + path[start:]: kind
            for path, kind in picture.types.items()
            if path[:start] == run[0]
        }
        picture = Picture(
            boxes,
            list(dict.fromkeys(edges)),
            {**picture.types, **types},
            {**picture.counts, folded: len(run)},
        )
    return picture


def _first_run(boxes: Iterable[Box]) -> list[Path]:
    """Returns the outermost run of equal modules with consecutive numbers; empty without one."""
    members: dict[Path, list[object]] = {}
    for box in boxes:
        key = box.kind, box.title, box.lines, box.results
        for depth in range(1, len(box.path) + 1):
            members.setdefault(box.path[:depth], []).append((box.path[depth:], key))
    numbered = sorted(
        (len(path), path[:-1], match[1], int(match[2]), path)
        for path in members
        if (match := _IN_LIST.fullmatch(path[-1]))
    )
    # In a run of consecutive numbers, the number grows with the index.
    keys = {
        path: (parent, name, number - index, members[path])
        for index, (_, parent, name, number, path) in enumerate(numbered)
    }
    runs = ([*run] for _, run in itertools.groupby(keys, key=keys.__getitem__))
    return next((run for run in runs if len(run) > 1), [])


def close_modules(picture: Picture, start: int, depth: int | None) -> Picture:
    """Draws each call of a module at a depth as one box.

    Args:
        picture: The picture.
        start: Number of levels of the module that is shown.
        depth: Number of levels of modules that are shown; None for as many as are readable.
    """
    if depth is not None:
        return _closed(picture, start + depth)
    deepest = max((len(box.path) for box in picture.boxes.values()), default=0)
    tried = [_closed(picture, start + n) for n in range(1, deepest + 2)]
    readable = [closed for closed in tried if len(closed.boxes) <= MOST_BOXES]
    return readable[-1] if readable else tried[0]


def _closed(picture: Picture, num_levels: int) -> Picture:
    """Closes the modules at a level, and modules with one op at any level.

    A call ends where an op of another module follows. Ops on integers and booleans between closed
    modules are one box.
    """
    ops = {name: box for name, box in picture.boxes.items() if box.ops}
    outer = {box.path[:i] for box in ops.values() for i in range(len(box.path))}
    calls: dict[str, tuple[Path, str]] = {}
    for path, names in itertools.groupby(ops, key=lambda name: ops[name].path[:num_levels]):
        run = [*names]
        is_leaf = len(run) == 1 and path and path not in outer
        if is_leaf or len(path) == num_levels:
            calls |= dict.fromkeys(run, (path, run[0]))
        else:
            indices = (*path, "indices"), ""
            calls |= {n: indices for n in run if FLOATS.isdisjoint(ops[n].dtypes)}
    members: dict[object, list[str]] = {}
    for name in picture.boxes:
        members.setdefault(calls.get(name, name), []).append(name)
    owner = {name: names[0] for names in members.values() for name in names}
    boxes = {}
    for first, *others in members.values():
        path, call = calls.get(first, ((), ""))
        inside = [picture.boxes[name] for name in (first, *others)]
        boxes[first] = _sum_of(path, inside, picture) if call or others else inside[0]
    edges = [
        edge._replace(source=owner[edge.source], target=owner[edge.target])
        for edge in picture.edges
        if owner[edge.source] != owner[edge.target]
    ]
    return picture._replace(boxes=boxes, edges=list(dict.fromkeys(edges)))


def _sum_of(path: Path, members: list[Box], picture: Picture) -> Box:
    """Returns one box for several. Its text counts one of several equal modules."""
    total = functools.reduce(Box.merged, members)
    counts = picture.counts.items()
    times = math.prod(count for folded, count in counts if path[: len(folded)] == folded)
    shares = Counter(SHORT.get(dtype, dtype) for dtype in total.dtypes).most_common()
    dtypes = [f"{n // times} {dtype}" if len(shares) > 1 else dtype for dtype, n in shares]
    num_ops = len(total.ops) // times
    what = f"{num_ops} ops:" if num_ops > 1 else members[0].title
    lines = (
        picture.types.get(path, "") if num_ops > 1 else "",
        f"{what} {', '.join(dtypes)}",
        cast_line(len(total.casts) // times, len(total.cached) // times),
    )
    return dataclasses.replace(
        total,
        kind="module",
        title="".join(path[-1:]) or "model",
        path=path[:-1],
        lines=lines,
        tooltip="\n".join(dict.fromkeys((".".join(path), *(box.title for box in members)))),
    )


def zoom(picture: Picture, focus: str) -> Picture | None:
    """Returns the boxes of one module, with its neighbors as small boxes; None without a box."""
    # A member of a list and its list are one level, so levels do not tell what is in a list.
    inside = {
        name
        for name, box in picture.boxes.items()
        if box.ops and f"{'.'.join(box.path)}.".startswith(f"{focus}.")
    }
    edges = [edge for edge in picture.edges if not inside.isdisjoint(edge[:2])]
    shown = inside.union(*(edge[:2] for edge in edges))
    boxes = {
        name: box
        if name in inside
        else Box("outside", box.title, lines=(f"in {'.'.join(box.path) or 'the model'}",))
        for name, box in picture.boxes.items()
        if name in shown
    }
    return picture._replace(boxes=boxes, edges=edges) if inside else None
