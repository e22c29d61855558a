"""How a kept value is made of weights alone, followed while inductor folds it.

Inductor's freezing computes what depends on weights only, once, and puts the results into the
graph as constants (``torch._inductor.constant_folding``). It folds in several rounds, between
which it rewrites the graph: weights are packed for oneDNN, products concatenated. ``Recipes``
listens in, and knows of each constant which ops made it, of which weights.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from amp_fx.graphs.casts import CONVERT
from amp_fx.graphs.purity import is_pure
from amp_fx.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import fx


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A weight as it is."""

    position: int


@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """A tensor that is part of the program, and no weight."""

    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """Describes a value that an op makes of other values, which are among its arguments."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @functools.cached_property
    def ingredients(self) -> list[Recipe]:
        """The values among its arguments."""
        found: list[Recipe] = []
        _with_parts(self, found.append)
        return found

    @functools.cached_property
    def needed(self) -> tuple[Recipe, ...]:
        """All that it is made of, each once, before what is made of it."""
        last: Recipe = self
        *needed, _ = _in_order(last, _ingredients)
        return tuple(needed)


Recipe: TypeAlias = "Weight | Fixed | Made"
T = TypeVar("T")


def sources_of(recipe: Recipe) -> frozenset[int]:
    """Positions of the weights that a value is made of."""
    return frozenset(part.position for part in _parts(recipe) if isinstance(part, Weight))


def ops_of(recipe: Recipe) -> tuple[str, ...]:
    """Names of the ops that make a value, in order."""
    made = (part.op for part in _parts(recipe) if isinstance(part, Made))
    return tuple(getattr(op, "_opname", getattr(op, "__name__", str(op))) for op in made)


def _in_order(last: T, needs: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Something and all that it needs, each once, before those that need it."""
    seen: set[T] = set()
    stack = [last]
    while stack:
        waiting = [each for each in needs(stack[-1]) if each not in seen]
        if waiting:
            stack.extend(waiting)
            continue
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            yield current


def _parts(recipe: Recipe) -> tuple[Recipe, ...]:
    return (*recipe.needed, recipe) if isinstance(recipe, Made) else (recipe,)


def _ingredients(recipe: Recipe) -> list[Recipe]:
    return recipe.ingredients if isinstance(recipe, Made) else []


def _with_parts(recipe: Made, fill: Callable[[Recipe], Any]) -> tuple[Any, Any]:
    """The arguments of an op, with something else in the place of each value among them."""

    def filled(value: Any) -> Any:
        return fill(value) if isinstance(value, (Weight, Fixed, Made)) else value

    args, kwargs = map_aggregate((recipe.args, recipe.kwargs), filled)
    return args, kwargs


def make(recipe: Recipe, weights: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Makes a value."""
    made = _made(recipe, weights)
    value: torch.Tensor = made[recipe]
    return value


def key_of(recipe: Recipe, identities: Mapping[int, int]) -> str:
    """The same for what the same ops make of the same weights, in whatever graph.

    The identities of the weights and the recipe must live as long as the key.
    """
    return _keys(recipe, identities)[recipe]


def packing_key(recipe: Recipe, identities: Mapping[int, int]) -> str:
    """The same for all that the last op makes of the same values, whatever else it is told."""
    keys = _keys(recipe, identities)
    op = recipe.op if isinstance(recipe, Made) else None
    return str((op, *(keys[part] for part in _ingredients(recipe))))


def _keys(recipe: Recipe, identities: Mapping[int, int]) -> dict[Recipe, str]:
    keys: dict[Recipe, str] = {}
    for part in _parts(recipe):
        if isinstance(part, Made):
            text = str((part.op, *_with_parts(part, keys.__getitem__)))
            keys[part] = hashlib.sha256(
                text.encode()
            ).hexdigest()  # short, however often it is used
        elif isinstance(part, Fixed):
            keys[part] = f"fixed {id(part.tensor)}"
        else:
            keys[part] = f"weight {identities[part.position]}"
    return keys


def steps(
    recipe: Recipe, weights: Mapping[int, torch.Tensor]
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Makes a value and tells of each op what it takes and gives, where that is one tensor."""
    made = _made(recipe, weights)
    for part, value in made.items():
        if isinstance(part, Made) and isinstance(value, torch.Tensor):
            taken = [made[ingredient] for ingredient in _ingredients(part)]
            yield [tensor for tensor in taken if isinstance(tensor, torch.Tensor)], value


def _made(recipe: Recipe, weights: Mapping[int, torch.Tensor]) -> dict[Recipe, Any]:
    made: dict[Recipe, Any] = {}
    for part in _parts(recipe):
        if isinstance(part, Made):
            args, kwargs = _with_parts(part, made.__getitem__)
            made[part] = _run(part.op, args, kwargs)
        else:
            made[part] = part.tensor if isinstance(part, Fixed) else weights[part.position]
    return made


def _run(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op; a cast, which is torch's own Python and takes long, as ATen has it."""
    if op is CONVERT and _is_dense(args[0]) and args[0].dtype is not args[1]:
        return args[0].to(args[1])
    return op(*args, **kwargs)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether both casts give the same strides for sure."""
    return tensor.is_contiguous() or (tensor.dim() > 1 and tensor.mT.is_contiguous())


def _text(recipe: Made) -> str:
    """The same for what one op makes of the same values."""
    return str((recipe.op, *_with_parts(recipe, lambda value: f"#{id(value)}")))


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

    def following(self, gm: fx.GraphModule) -> AbstractContextManager[None]:
        """Follows how inductor folds constants into this graph, while the context is open.

        Impure nodes are neither folded nor run. Relies on
        ``torch._inductor.constant_folding.constant_fold`` calling that module's
        ``replace_node_with_constant(gm, node, constant, name)`` for each node it folds, and
        ``ConstantFolder.run_node(node)`` before, which gives ``unknown_value`` for all others.
        """
        from torch._inductor import constant_folding
        from torch._inductor.constant_folding import ConstantFolder

        original = constant_folding.replace_node_with_constant
        run_node = ConstantFolder.run_node

        def replace(of: fx.GraphModule, node: Node, constant: Any = None, name: Any = None) -> None:
            if of is not gm:  # another thread's
                original(of, node, constant, name)
                return
            recipe, name = self._of(gm, node), name or self._next_name()
            original(of, node, constant, name)
            self._known[name] = recipe

        def run_if_pure(self: ConstantFolder, node: Node) -> Any:
            if self.module is gm and node.op == "call_function" and not is_pure(node):
                return self.unknown_value
            return run_node(self, node)

        return replaced(
            (constant_folding, "replace_node_with_constant", replace),
            (ConstantFolder, "run_node", run_if_pure),
        )

    def _next_name(self) -> str:
        """Names a constant as inductor would: the same in all processes, as caches store it."""
        return f"_frozen_param{len(self._known)}"

    def _of(self, gm: fx.GraphModule, node: Node) -> Recipe:
        """Returns the recipe for a node that depends only on constants."""
        made: dict[Node, Recipe] = {}
        for current in _in_order(node, lambda each: each.all_input_nodes):
            made[current] = self._step(gm, current, made)
        return made[node]

    def _step(self, gm: fx.GraphModule, node: Node, made: Mapping[Node, Recipe]) -> Recipe:
        if node.op == "get_attr":
            name = str(node.target)
            return self._known.get(name) or Fixed(getattr(gm, name))

        def filled(value: Any) -> Any:
            return made[value] if isinstance(value, Node) else value

        if _is_no_cast(gm, node) and _is_cast(made[node.all_input_nodes[0]]):
            return made[node.all_input_nodes[0]]
        args, kwargs = map_aggregate((node.args, node.kwargs), filled)
        recipe = Made(node.target, tuple(args), dict(kwargs))
        # What is made alike is one: a cell that is unrolled packs its weight at every step.
        return self._made.setdefault(_text(recipe), recipe)


def _is_no_cast(gm: fx.GraphModule, node: Node) -> bool:
    """Whether a node casts to the dtype that a value has, as inductor does when it has folded."""
    if node.target is not CONVERT:
        return False
    source, dtype = node.args
    assert isinstance(source, Node)
    value = source.meta.get("val")
    if source.op == "get_attr":
        value = getattr(gm, str(source.target))
    return isinstance(value, torch.Tensor) and value.dtype == dtype


def _is_cast(recipe: Recipe) -> bool:
    """Whether a value is no weight's own memory: a cast made it."""
    return any(isinstance(part, Made) and part.op is CONVERT for part in _parts(recipe))
