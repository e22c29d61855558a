"""Graphs of ops that depend on weights alone, and descriptions of the values they compute."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_arg

from amp_fx.graphs.casts import CONVERT
from amp_fx.graphs.metadata import CONSTANT, VALUE
from amp_fx.policies.calls import TO_COPY
from amp_fx.weights.aliases import is_view, viewed_by

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    Weights = tuple[torch.Tensor, ...]

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, eq=False)
class CachedValueSpec:
    """Description of tensors that are computed together from weights alone.

    Attributes:
        positions: Positions of the weights among the inputs of the graph.
        names: Names of the weights in the user's program.
        nodes: Nodes of ``prepare`` that compute the tensors, in topological order.
        outputs: The nodes whose results are cached.
        is_alias: Whether the value is an alias of the weight with a separate storage. Compiled
            code may request pointers from that storage without this counting as a write.
    """

    positions: tuple[int, ...]
    names: tuple[str, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    is_alias: bool = False

    @functools.cached_property
    def ops(self) -> tuple[str, ...]:
        """Names of the ops that compute the value, in order."""
        targets = [n.target for n in self.nodes if n.op == "call_function"]
        named = [t for t in targets if t is not operator.getitem]
        return tuple(getattr(t, "_opname", getattr(t, "__name__", str(t))) for t in named)

    @functools.cached_property
    def _key(self) -> str:
        # Positions instead of names, which differ between graphs that compute the same.
        names = {node: f"%{index}" for index, node in enumerate(self.nodes)}
        text = [_text(node, names.__getitem__) for node in self.nodes]
        outputs = [names[node] for node in self.outputs]
        return hashlib.sha256(repr((text, outputs, self.is_alias)).encode()).hexdigest()

    def key(self, weights: Weights) -> Hashable:  # noqa: ARG002
        """Returns a key that is equal for equal computations in any graph."""
        return self._key

    def make(self, weights: Weights) -> Any:
        """Computes the value: a tensor, or a tuple of tensors if there are several outputs."""
        results = self.evaluate(weights)
        return results[0] if len(results) == 1 else results

    def evaluate(self, weights: Weights) -> tuple[torch.Tensor, ...]:
        """Computes the outputs one op at a time."""
        # Intermediate results are freed after their last reader: all weights of a model in one more
        # dtype would double its memory.
        remaining_weights = iter(weights)
        values: dict[fx.Node, Any] = {}
        for node in self.nodes:
            is_weight = node.op == "placeholder"
            values[node] = next(remaining_weights) if is_weight else run_node(node, values)
            for intermediate in self._freed_after.get(node, ()):
                del values[intermediate]
        return tuple(values[node] for node in self.outputs)

    @functools.cached_property
    def _freed_after(self) -> dict[fx.Node, list[fx.Node]]:
        """Maps each node to the intermediate results that no later node reads."""
        last_users: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            last_users.update(dict.fromkeys(node.all_input_nodes, node))
        freed: dict[fx.Node, list[fx.Node]] = {}
        for intermediate, user in last_users.items():
            if intermediate not in self.outputs:
                freed.setdefault(user, []).append(intermediate)
        return freed

    @functools.cached_property
    def is_cast(self) -> bool:
        """True if the value is a cast of one weight."""
        calls = [node for node in self.nodes if node.op == "call_function"]
        is_one = len(self.outputs) == len(self.positions) == 1
        if not is_one or not 1 <= len(calls) <= 2 or cast_dtype(calls[0]) is None:
            return False
        return all(node.target is aten.clone.default for node in calls[1:])

    def casts(self) -> Iterable[tuple[int, torch.dtype]]:
        """Yields position and target dtype for each cast of a weight."""
        positions = dict(zip(self.nodes, self.positions, strict=False))
        for node in self.nodes:
            dtype = cast_dtype(node) if node.op == "call_function" else None
            if dtype is None:
                continue
            source = viewed_by(node.all_input_nodes[0])
            if source in positions:
                yield positions[source], dtype

    def cast_layout(self, weight: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Returns dtype and strides of the value if it is a cast of one weight, else None."""
        del weight  # Dynamo guards its strides, so the compiled graph's strides are valid
        value = VALUE.get(self.outputs[0])
        if not self.is_cast or value is None:  # inductor's passes add casts without values
            return None
        return value.dtype, value.stride()


def cast_dtype(node: fx.Node) -> torch.dtype | None:
    """Returns the dtype that a node casts to; None if the node is not a plain cast."""
    if node.target is CONVERT:
        return node.args[1]  # type: ignore[return-value]
    passed = {name for name, value in node.kwargs.items() if value is not None}
    if node.target is TO_COPY and passed == {"dtype"}:
        return node.kwargs["dtype"]  # type: ignore[return-value]
    return None


def run_node(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Executes a node of ``prepare`` on real tensors."""
    if node.op == "get_attr":
        return CONSTANT.of(node)
    args: Any
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    if node.target is CONVERT and args[0].dtype is not args[1]:
        source, dtype = args
        # prims are implemented in Python, which is slow. ``to`` certainly gives their strides for
        # such sources.
        if source.is_contiguous() or (source.dim() > 1 and source.mT.is_contiguous()):
            return source.to(dtype)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _text(node: fx.Node, name_of: Callable[[fx.Node], str]) -> str:
    if node.op == "placeholder":  # data of another shape may be assigned to a parameter
        value = VALUE.of(node)
        return f"weight {value.dtype} {tuple(value.shape)} {value.stride()}"
    if node.op == "get_attr":
        return f"constant {id(CONSTANT.of(node))}"
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: _Name(name_of(n)))
    return f"{node.target}{args}{sorted(kwargs.items())}"


class _Name(str):
    """Node name that is printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Prepare:
    """Graph of all ops that depend on weights alone.

    Equal nodes are merged, so that an unrolled recurrent cell packs its weight once.

    Args:
        names: Names of the weights in the user's program, by position.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.graph = fx.Graph()
        self._names = names
        self._positions: dict[fx.Node, int] = {}
        self._weights: dict[int, fx.Node] = {}
        self._sources: dict[fx.Node, frozenset[fx.Node]] = {}
        self._merged: dict[str, fx.Node] = {}

    def weight(self, position: int, value: torch.Tensor) -> fx.Node:
        """Returns the placeholder of a weight.

        Args:
            position: Position of the weight among the inputs of the graph.
            value: Fake tensor of the weight.
        """
        if position not in self._weights:
            with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
                node = self.graph.placeholder(f"weight_{position}")
            VALUE.put(node, value)
            self._weights[position] = node
            self._positions[node] = position
            self._sources[node] = frozenset([node])
        return self._weights[position]

    def add(
        self, node: fx.Node, copies: Mapping[fx.Node, fx.Node], constant: Any = None
    ) -> fx.Node:
        """Copies a node of a split graph.

        Args:
            node: A node whose inputs all have copies.
            copies: The copies of other nodes.
            constant: The tensor of a ``get_attr`` node.

        Returns:
            The copy, or an equal existing node.
        """
        if _is_noop_cast(node):
            source = copies[node.all_input_nodes[0]]
            if source not in self._positions:  # a value must not be the weight itself
                return source
        copy = self.graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            CONSTANT.put(copy, constant)
        return self._merge(copy)

    def call(self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> fx.Node:
        """Adds a call of an op on nodes; returns its node, or an equal existing node."""
        return self._merge(self.graph.call_function(op, args, kwargs))

    def _merge(self, node: fx.Node) -> fx.Node:
        """Returns an equal existing node and erases ``node``, or returns ``node``."""
        # Names identify the arguments, because these were merged before.
        text = _text(node, lambda n: n.name)
        if text in self._merged:
            self.graph.erase_node(node)
            return self._merged[text]
        self._merged[text] = node
        self._sources[node] = frozenset().union(
            *map(self._sources.__getitem__, node.all_input_nodes)
        )
        return node

    def weights_of(self, copy: fx.Node) -> frozenset[fx.Node]:
        """Returns the weights that a node depends on."""
        return self._sources[copy]

    def specs(self, outputs: Iterable[fx.Node]) -> list[CachedValueSpec]:
        """Groups results into values and describes them.

        Results that share an op belong to one value. Shared pointwise ops and views do not count:
        separate values are more likely to be shared with other graphs.
        """
        # A value is refreshed as a whole. Two results of one expensive op must be one value, or the
        # op would run twice in each refresh.
        groups: list[tuple[set[fx.Node], list[fx.Node]]] = []
        for output in dict.fromkeys(outputs):
            nodes = _in_order([output])
            computed = {n for n in nodes if n.op == "call_function" and not _is_cheap(n)}
            members = [output]
            for group in [g for g in groups if not computed.isdisjoint(g[0])]:
                groups.remove(group)
                computed |= group[0]
                members = [*group[1], *members]
            groups.append((computed, members))
        return [self._spec(members) for _, members in groups]

    def alias(self, weight: fx.Node) -> CachedValueSpec:
        """Describes the value that is an alias of a weight."""
        position = self._positions[weight]
        names = (self._names[position],)
        return CachedValueSpec((position,), names, (weight,), (weight,), is_alias=True)

    def _spec(self, outputs: list[fx.Node]) -> CachedValueSpec:
        needed = dict.fromkeys(_in_order(outputs))
        weights = [n for n in needed if n in self._positions]
        rest = [n for n in self.graph.nodes if n in needed and n not in self._positions]
        positions = tuple(self._positions[n] for n in weights)
        names = tuple(self._names[i] for i in positions)
        ordered = sorted(outputs, key=rest.index) if outputs[0] in rest else outputs
        return CachedValueSpec(positions, names, (*weights, *rest), tuple(ordered))


def _in_order(outputs: Iterable[fx.Node]) -> list[fx.Node]:
    """Returns nodes and all their dependencies in depth-first order."""
    visited: dict[fx.Node, None] = {}
    stack = [*reversed(list(outputs))]
    while stack:
        node = stack.pop()
        if node not in visited:
            visited[node] = None
            stack.extend(reversed(node.all_input_nodes))
    return list(visited)


def _is_noop_cast(node: fx.Node) -> bool:
    """Returns True for casts to the dtype that the value already has; folding leaves such casts."""
    if node.target is not CONVERT:
        return False
    source = VALUE.get(node.all_input_nodes[0])
    return isinstance(source, torch.Tensor) and source.dtype == node.args[1]


def _is_cheap(node: fx.Node) -> bool:
    """Returns True for views, casts and other pointwise ops."""
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_pointwise or is_view(node) or cast_dtype(node) is not None
