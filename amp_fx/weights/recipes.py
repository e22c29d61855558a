"""How a kept value is made of weights alone, followed while inductor folds it.

Inductor's freezing computes what depends on weights only, once, and puts the results into the
graph as constants (``torch._inductor.constant_folding``). It folds in several rounds, between
which it rewrites the graph: weights are packed for oneDNN, products concatenated. ``Recipes``
listens in, and knows of each constant which ops made it, of which weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.fx import Node
from torch.fx.node import map_aggregate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import fx


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A weight as it is.

    Attributes:
        position: Among the inputs of the graph.
    """

    position: int


@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """A tensor that is part of the program, and no weight."""

    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """What an op makes of other values, which stand among its arguments."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Recipe: TypeAlias = "Weight | Fixed | Made"


def sources_of(recipe: Recipe) -> frozenset[int]:
    """Positions of the weights that a value is made of."""
    return frozenset(part.position for part in _parts(recipe) if isinstance(part, Weight))


def ops_of(recipe: Recipe) -> tuple[str, ...]:
    """Names of the ops that make a value, in order."""
    made = (part.op for part in _parts(recipe) if isinstance(part, Made))
    return tuple(getattr(op, "_opname", getattr(op, "__name__", str(op))) for op in made)


def _parts(recipe: Recipe) -> Iterator[Recipe]:
    """All parts of a recipe, each once, before those that need it."""
    seen: set[int] = set()
    stack = [recipe]
    while stack:
        part = stack[-1]
        waiting = [p for p in _ingredients(part) if id(p) not in seen]
        if waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part


def _ingredients(recipe: Recipe) -> list[Recipe]:
    found: list[Recipe] = []
    if isinstance(recipe, Made):

        def note(value: Any) -> Any:
            if isinstance(value, (Weight, Fixed, Made)):
                found.append(value)
            return value

        map_aggregate((recipe.args, recipe.kwargs), note)
    return found


def make(recipe: Recipe, weights: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Makes a value.

    Args:
        recipe: Its recipe.
        weights: The weights, by position.
    """
    made: dict[int, Any] = {}
    for part in _parts(recipe):
        made[id(part)] = _make_part(part, weights, made)
    value: torch.Tensor = made[id(recipe)]
    return value


def _make_part(part: Recipe, weights: Mapping[int, torch.Tensor], made: Mapping[int, Any]) -> Any:
    if isinstance(part, Weight):
        return weights[part.position]
    if isinstance(part, Fixed):
        return part.tensor

    def filled(value: Any) -> Any:
        return made[id(value)] if isinstance(value, (Weight, Fixed, Made)) else value

    args, kwargs = map_aggregate((part.args, part.kwargs), filled)
    return part.op(*args, **kwargs)


def _text(recipe: Made) -> str:
    """The same for what one op makes of the same values."""

    def named(value: Any) -> Any:
        return f"#{id(value)}" if isinstance(value, (Weight, Fixed, Made)) else value

    return str((recipe.op, map_aggregate((recipe.args, recipe.kwargs), named)))


class Recipes:
    """The recipes of a graph's constants, by the attributes of the graph that hold them."""

    def __init__(self) -> None:
        self._known: dict[str, Recipe] = {}
        self._made: dict[str, Made] = {}

    def __getitem__(self, name: str) -> Recipe:
        return self._known[name]

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def put(self, gm: fx.GraphModule, node: Node, value: torch.Tensor, recipe: Recipe) -> None:
        """Replaces a node of a graph by a constant that has a recipe."""
        from torch._inductor.constant_folding import replace_node_with_constant

        name = self._next_name()
        replace_node_with_constant(gm, node, value, name)
        self._known[name] = recipe

    @contextlib.contextmanager
    def following(self, gm: fx.GraphModule) -> Iterator[None]:
        """Where inductor folds constants into this graph.

        Relies on ``torch._inductor.constant_folding.constant_fold`` calling that module's
        ``replace_node_with_constant(gm, node, constant, name)`` for each node it folds.
        """
        from torch._inductor import constant_folding

        original = constant_folding.replace_node_with_constant

        def replace(of: fx.GraphModule, node: Node, constant: Any = None, name: Any = None) -> None:
            if of is not gm:  # another thread's
                original(of, node, constant, name)
                return
            recipe, name = self._of(gm, node), name or self._next_name()
            original(of, node, constant, name)
            self._known[name] = recipe

        with _lock:
            constant_folding.replace_node_with_constant = replace  # type: ignore[assignment]
            try:
                yield
            finally:
                constant_folding.replace_node_with_constant = original

    def _next_name(self) -> str:
        """As inductor would call a constant: alike in all processes, whose caches know it so."""
        return f"_frozen_param{len(self._known)}"

    def _of(self, gm: fx.GraphModule, node: Node) -> Recipe:
        """What makes a node of a graph that depends on constants alone."""
        made: dict[Node, Recipe] = {}
        stack = [node]
        while stack:
            current = stack[-1]
            waiting = [n for n in current.all_input_nodes if n not in made]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if current not in made:
                made[current] = self._step(gm, current, made)
        return made[node]

    def _step(self, gm: fx.GraphModule, node: Node, made: Mapping[Node, Recipe]) -> Recipe:
        if node.op == "get_attr":
            name = str(node.target)
            return self._known.get(name) or Fixed(getattr(gm, name))

        def filled(value: Any) -> Any:
            return made[value] if isinstance(value, Node) else value

        args, kwargs = map_aggregate((node.args, node.kwargs), filled)
        recipe = Made(node.target, tuple(args), dict(kwargs))
        # What is made alike is one: a cell that is unrolled packs its weight at every step.
        return self._made.setdefault(_text(recipe), recipe)


_lock = threading.RLock()
