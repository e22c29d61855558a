"""Chooses the modules that a picture shows closed, so that it stays small and even."""

from __future__ import annotations

from amp_fx.drawing.folding import is_inside

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
    """How many boxes more there are when some modules are opened."""
    return sum(_direct(modules, path) + len(_children(modules, path)) - 1 for path in paths)


def _children(modules: list[str], path: str) -> list[str]:
    """The modules right inside of one, in order."""
    prefix = f"{path}." if path else ""
    inside = [m[len(prefix) :] for m in modules if m.startswith(prefix) and m != path and m]
    return [prefix + name for name in dict.fromkeys(m.partition(".")[0] for m in inside)]


def _direct(modules: list[str], path: str) -> int:
    return sum(module == path for module in modules)
