"""Makes pictures of large models readable: repeated modules are one, deep modules are closed.

Equal consecutive modules of a list become one (``layers.0`` to ``layers.11`` become
``layers.0-11``, drawn with ``x 12``). Modules at a given depth become closed boxes.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from amp_fx.drawing.boxes import Box, Picture, count_lines
from amp_fx.errors import OptionError
from amp_fx.explanation.table import number_ranges
from amp_fx.regions.names import join_path
from amp_fx.reports import SHORT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MOST_BOXES = 20
"""Maximum number of boxes of a picture whose depth the caller does not choose."""

_LEVEL = re.compile(r"[^.\d][^.]*(?:\.\d[\d,-]*(?![^.]))?|\d[\d,-]*|[^.]+")
"""One level of a module path: a name with a number in its list, as in ``layers.0``."""


def levels(path: str) -> list[str]:
    """Returns the levels of a module path: ``layers.0`` and ``attn`` for ``layers.0.attn``."""
    return _LEVEL.findall(path)


def is_inside(module: str, path: str) -> bool:
    """Returns True if ``module`` is the module ``path`` or inside it."""
    return not path or module == path or module.startswith(f"{path}.")


def fold_repeats(picture: Picture) -> tuple[Picture, dict[str, int]]:
    """Makes each run of equal consecutive modules of a list one module.

    Modules are equal if their boxes are, in order. Edges between two of them are dropped; edges out
    of the last one start at the remaining one.

    Returns:
        The picture, and the number of modules in each folded path.
    """
    counts: dict[str, int] = {}
    while run := _first_run(picture.boxes):
        numbers = number_ranges(int(path.rpartition(".")[2]) for path in run)
        folded = join_path(run[0].rpartition(".")[0], numbers)
        counts[folded] = len(run)
        copies = [_members(picture.boxes, path) for path in run]
        first = {name: kept for copy in copies for name, kept in zip(copy, copies[0], strict=True)}
        index = {name: i for i, copy in enumerate(copies) for name in copy}
        boxes: dict[str, Box] = {}
        for name, box in picture.boxes.items():
            if index.get(name, 0) == 0:
                module = folded + box.module[len(run[0]) :] if name in index else box.module
                boxes[name] = dataclasses.replace(box, module=module)
            else:
                boxes[first[name]] = _sum(boxes[first[name]], box)
        edges = [
            edge._replace(
                source=first.get(edge.source, edge.source),
                target=first.get(edge.target, edge.target),
            )
            for edge in picture.edges
            if index.get(edge.source, -1) == index.get(edge.target, -1)
            or edge.source not in index
            or edge.target not in index
        ]
        picture = Picture(boxes, list(dict.fromkeys(edges)))
    return picture, counts


def _sum(box: Box, other: Box) -> Box:
    return dataclasses.replace(
        box,
        dtypes=box.dtypes + other.dtypes,
        ops=box.ops + other.ops,
        casts=box.casts | other.casts,
        cached=box.cached | other.cached,
    )


def _members(boxes: Mapping[str, Box], path: str) -> list[str]:
    return [name for name, box in boxes.items() if box.module and is_inside(box.module, path)]


def _first_run(boxes: Mapping[str, Box]) -> list[str]:
    """Returns the outermost run of equal modules with consecutive numbers; empty without one."""
    modules = {tuple(box.module.split(".")) for box in boxes.values()}
    paths = {module[:i] for module in modules for i in range(1, len(module) + 1)}
    numbered = sorted(
        (len(path), path[:-1], int(path[-1]), path) for path in paths if path[-1].isdecimal()
    )
    keys = {}
    for index, (_, parent, number, names) in enumerate(numbered):
        path = ".".join(names)
        # In a run of consecutive numbers, the number grows with the index.
        keys[path] = parent, number - index, _signature(boxes, path)
    runs = ([*run] for _, run in itertools.groupby(keys, key=keys.__getitem__))
    return next((run for run in runs if len(run) > 1), [])


def _signature(boxes: Mapping[str, Box], path: str) -> list[object]:
    members = [boxes[name] for name in _members(boxes, path)]
    return [(box.module[len(path) :], box.signature) for box in members]


def close_modules(
    picture: Picture,
    types: Mapping[str, str],
    counts: Mapping[str, int],
    root: str,
    depth: int | None,
) -> Picture:
    """Draws each call of a module at a depth as one box.

    Args:
        picture: The picture.
        types: Classes of modules by path.
        counts: Number of modules in each folded path.
        root: The module that is shown.
        depth: Number of levels of modules that are shown; None for as many as are readable.
    """
    start = len(levels(root))
    if depth is not None:
        return _closed(picture, types, counts, start + depth)
    deepest = max((len(levels(box.module)) for box in picture.boxes.values()), default=0)
    tried = [_closed(picture, types, counts, start + n) for n in range(1, deepest + 2)]
    readable = [closed for closed in tried if len(closed.boxes) <= MOST_BOXES]
    return readable[-1] if readable else tried[0]


def _closed(
    picture: Picture, types: Mapping[str, str], counts: Mapping[str, int], num_levels: int
) -> Picture:
    """Closes the modules at a level, and modules with one op at any level.

    A call ends where an op of another module follows. Ops on integers and booleans between closed
    modules are one box.
    """
    parts = {name: levels(box.module) for name, box in picture.boxes.items()}
    outer = {".".join(path[:i]) for path in parts.values() for i in range(len(path))}
    paths = {n: ".".join(parts[n][:num_levels]) for n, box in picture.boxes.items() if box.ops}
    owner = {name: name for name in picture.boxes}
    for path, names in itertools.groupby(paths, key=paths.__getitem__):
        run = [*names]
        is_leaf = len(run) == 1 and path and path not in outer
        if is_leaf or len(levels(path)) == num_levels:
            owner |= dict.fromkeys(run, f"{path}#{run[0]}")
        else:
            indices = join_path(path, "indices#")
            owner |= {n: indices for n in run if FLOATS.isdisjoint(picture.boxes[n].dtypes)}
    groups: dict[str, list[Box]] = {}
    for name, box in picture.boxes.items():
        groups.setdefault(owner[name], []).append(box)
    boxes = {}
    for group, members in groups.items():
        path, mark, name = group.partition("#")
        is_one = not mark or (not name and len(members) == 1)
        boxes[group] = members[0] if is_one else _sum_of(path, members, types, counts)
    edges = [
        edge._replace(source=owner[edge.source], target=owner[edge.target])
        for edge in picture.edges
        if owner[edge.source] != owner[edge.target]
    ]
    return Picture(boxes, list(dict.fromkeys(edges)))


FLOATS = frozenset(("bfloat16", "float16", "float32", "float64"))


def _sum_of(
    path: str, members: list[Box], types: Mapping[str, str], counts: Mapping[str, int]
) -> Box:
    """Returns one box for several. Its text counts one of several equal modules."""
    total = functools.reduce(_sum, members)
    times = math.prod(n for folded, n in counts.items() if is_inside(path, folded))
    num_ops, num_casts, num_cached = (
        len(names) // times for names in (total.ops, total.casts, total.cached)
    )
    is_mixed = not FLOATS.isdisjoint(total.dtypes)
    shares = Counter(
        "other" if is_mixed and dtype not in FLOATS else SHORT.get(dtype, dtype)
        for dtype in total.dtypes
    )
    dtypes = ", ".join(
        f"{count // times} {dtype}" if len(shares) > 1 else dtype
        for dtype, count in shares.most_common()
    )
    what = f"{num_ops} ops:" if num_ops > 1 else members[0].title
    names = Counter(box.title for box in members)
    listed = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in names.items())
    parent, last = levels(path)[:-1], levels(path)[-1:]
    lines = (
        types.get(first_path(path), ""),
        f"{what} {dtypes}",
        *count_lines(num_casts, num_cached),
    )
    return dataclasses.replace(
        total,
        kind="module",
        title="".join(last) or "model",
        module=".".join(parent),
        lines=tuple(filter(None, lines)),
        tooltip=f"{path}\n{listed}",
    )


def first_path(path: str) -> str:
    """Returns the path of the first module that a folded path represents."""
    return re.sub(r"(?<![^.])(\d+)[-,][\d,-]+", r"\1", path)


def zoom(picture: Picture, focus: str) -> Picture | None:
    """Returns the boxes of one module, with its neighbors as small boxes; None without a box."""
    inside = {*_members(picture.boxes, focus)}
    if not inside:
        return None
    edges = [edge for edge in picture.edges if edge.source in inside or edge.target in inside]
    shown = inside.union(*((edge.source, edge.target) for edge in edges))
    boxes = {
        name: box
        if name in inside
        else Box("outside", box.title, lines=(f"in {box.module}",) if box.module else ())
        for name, box in picture.boxes.items()
        if name in shown
    }
    return Picture(boxes, edges)


def unknown_focus(pictures: Iterable[Picture], focus: str) -> OptionError:
    """Returns the error for a module without boxes, with suggestions."""
    modules = {box.module for picture in pictures for box in picture.boxes.values() if box.module}
    paths = {".".join(m.split(".")[: i + 1]) for m in modules for i in range(m.count(".") + 1)}
    similar = difflib.get_close_matches(focus, sorted(paths), n=4, cutoff=0.4)
    label = "similar names" if similar else "modules"
    names = similar or sorted(paths, key=lambda path: (path.count("."), path))[:8]
    hint = f"{label}: {', '.join(names)}" if names else "no modules"
    return OptionError(f"focus={focus!r} is not a module with ops in the graph; {hint}")
