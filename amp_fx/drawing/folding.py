"""Makes pictures of large models readable: repeated modules are one, deep modules are closed.

Equal consecutive modules of a list become one (``layers.0`` to ``layers.11`` become
``layers.0-11``, drawn with ``x 12``). Modules at a given depth become closed boxes.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from typing import TYPE_CHECKING

from amp_fx.drawing.boxes import Box, Picture
from amp_fx.errors import OptionError
from amp_fx.explanation.table import number_ranges
from amp_fx.regions.names import join_path
from amp_fx.reports import SHORT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MOST_BOXES = 24
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
    paths: set[str] = set()
    for box in boxes.values():
        parts = box.module.split(".")
        paths |= {".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdecimal()}
    key = {path: (path.count("."), path.rpartition(".")[0], _number(path)) for path in paths}
    run: list[str] = []
    for path in sorted(paths, key=key.__getitem__):
        is_next = run and key[path] == (*key[run[-1]][:2], _number(run[-1]) + 1)
        if is_next and _signature(boxes, path) == _signature(boxes, run[-1]):
            run.append(path)
        elif len(run) > 1:
            return run
        else:
            run = [path]
    return run if len(run) > 1 else []


def _number(path: str) -> int:
    return int(path.rpartition(".")[2])


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
    if depth is not None:
        return _closed(picture, types, counts, root, depth)
    deepest = max((len(levels(box.module)) for box in picture.boxes.values()), default=0) + 1
    tried = [_closed(picture, types, counts, root, depth) for depth in range(1, deepest + 1)]
    readable = [closed for closed in tried if len(closed.boxes) <= MOST_BOXES]
    return readable[-1] if readable else tried[0]


def _closed(
    picture: Picture, types: Mapping[str, str], counts: Mapping[str, int], root: str, depth: int
) -> Picture:
    num_levels = len(levels(root)) + depth
    calls = _calls(picture, num_levels)
    groups: dict[tuple[str, int], list[str]] = {}
    for name, call in calls.items():
        groups.setdefault(call, []).append(name)
    owner: dict[str, str] = {}
    boxes: dict[str, Box] = {}
    for (path, number), names in groups.items():
        members = [picture.boxes[name] for name in names]
        is_closed = number >= 0 or len(members) > 1
        group = f"{path}#{number}" if is_closed else names[0]
        boxes[group] = _sum_of(path, members, types, counts) if is_closed else members[0]
        owner |= dict.fromkeys(names, group)
    edges = [
        edge._replace(source=owner[edge.source], target=owner[edge.target])
        for edge in picture.edges
        if owner[edge.source] != owner[edge.target]
    ]
    return Picture(boxes, list(dict.fromkeys(edges)))


def _calls(picture: Picture, num_levels: int) -> dict[str, tuple[str, int]]:
    """Returns, for each box, its closed module and the number of that module's call.

    A call ends where an op of another module follows. Modules with one op are closed at every
    depth. Ops outside of closed modules have the number -1, and a path of their own. Those on
    integers and booleans in one module have one path, if any module is closed.
    """
    outer = {
        ".".join(parts[:i])
        for parts in (levels(box.module) for box in picture.boxes.values())
        for i in range(len(parts))
    }
    names = [*picture.boxes]
    modules = [picture.boxes[name].module for name in names]
    calls: dict[str, tuple[str, int]] = {}
    num_calls = Counter[str]()
    last = ""
    for i, name in enumerate(names):
        box, parts = picture.boxes[name], levels(modules[i])
        is_neighbor = box.module in (*modules[i - 1 : i], *modules[i + 1 : i + 2])
        is_leaf = len(parts) <= num_levels and box.module not in outer and not is_neighbor
        path = ""
        if box.kind in ("op", "opaque"):
            path = ".".join(parts[:num_levels]) if is_leaf or len(parts) >= num_levels else ""
            if (path or num_levels == 0) and (is_leaf or path != last):
                num_calls[path] += 1
        last = path
        if path or (num_levels == 0 and box.kind in ("op", "opaque")):
            calls[name] = path, num_calls[path]
        elif box.kind == "op" and not FLOATS.intersection(box.dtypes):
            calls[name] = f"{box.module}.indices".lstrip("."), -1
        else:
            calls[name] = name, -1
    return calls


FLOATS = frozenset(("bfloat16", "float16", "float32", "float64"))


def _sum_of(
    path: str, members: list[Box], types: Mapping[str, str], counts: Mapping[str, int]
) -> Box:
    """Returns one box for several. Its text counts one of several equal modules."""
    total = members[0]
    for box in members[1:]:
        total = _sum(total, box)
    times = times_of(path, counts)
    num_ops, num_casts, num_cached = (
        len(names) // times for names in (total.ops, total.casts, total.cached)
    )
    shares = Counter(SHORT.get(dtype, dtype) for dtype in total.dtypes)
    dtypes = ", ".join(
        f"{count // times} {dtype}" if num_ops > 1 else dtype
        for dtype, count in shares.most_common()
    )
    what = f"{num_ops} ops:" if num_ops > 1 else members[0].title
    parts = levels(path)
    names = Counter(box.title for box in members)
    listed = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in names.items())
    return dataclasses.replace(
        total,
        kind="module",
        title=parts[-1] if parts else "model",
        module=".".join(parts[:-1]),
        lines=(
            *filter(None, [types.get(path, "")]),
            f"{what} {dtypes}",
            *([f"{num_casts} cast{'s' if num_casts > 1 else ''}"] if num_casts else []),
            *([f"{num_cached} cached"] if num_cached else []),
        ),
        tooltip=f"{path}\n{listed}",
    )


def times_of(path: str, counts: Mapping[str, int]) -> int:
    """Returns the number of modules that a folded path represents."""
    times = 1
    for folded, count in counts.items():
        times *= count if is_inside(path, folded) else 1
    return times


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
    parts = [module.split(".") for module in modules]
    paths = {".".join(names[: i + 1]) for names in parts for i in range(len(names))}
    similar = difflib.get_close_matches(focus, sorted(paths), n=4, cutoff=0.4)
    suggestions = similar or sorted(paths, key=lambda path: (path.count("."), path))[:8]
    label = "similar names" if similar else "modules"
    hint = f"{label}: {', '.join(suggestions)}" if suggestions else "no modules"
    return OptionError(f"focus={focus!r} is not a module with ops in the graph; {hint}")
