"""Splits graphs of AOTAutograd into ops that depend on weights alone and the rest.

Before:
    graph(weight, x):
        %cast = prims.convert_element_type(%weight, torch.bfloat16)
        %y    = aten.mm(%x, %cast)
After:
    prepare(weight):                  # run once per update of the weight (``store``)
        %cast = prims.convert_element_type(%weight, torch.bfloat16)
    rest(x, cast):                    # compiled, run in every call
        %y    = aten.mm(%x, %cast)

Views at the end of ``prepare`` stay in the rest, where they cost nothing, so that graphs with
different views of one value share the value. Also left in the rest on purpose: values that the
graph returns, values larger than their weights, symbolic sizes, and every op that is not a pure
function of its arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_arg

from amp_fx.graphs.casts import CONVERT
from amp_fx.graphs.metadata import CONSTANT, VALUE
from amp_fx.graphs.purity import is_pure
from amp_fx.graphs.sizes import num_bytes
from amp_fx.graphs.values import is_symbolic, tensors_in
from amp_fx.policies.calls import TO_COPY
from amp_fx.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

    Weights = tuple[torch.Tensor, ...]
    Copies = dict[fx.Node, fx.Node]


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
    if node.target is CONVERT and _has_plain_strides(args[0]) and args[0].dtype is not args[1]:
        return args[0].to(args[1])  # prims are implemented in Python, which is slow
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _has_plain_strides(tensor: torch.Tensor) -> bool:
    """Returns True if ``to`` certainly gives the strides of ``prims.convert_element_type``."""
    return tensor.is_contiguous() or (tensor.dim() > 1 and tensor.mT.is_contiguous())


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


def is_view(node: fx.Node) -> bool:
    """Returns True if a node's results are views of its inputs."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    if node.target is aten.reshape.default:
        return _is_viewable(VALUE.get(node.all_input_nodes[0]), VALUE.get(node))
    has_view_schema = getattr(node.target, "is_view", False)
    return bool(has_view_schema) or node.target is aten._unsafe_view.default


def _is_viewable(value: Any, reshaped: Any) -> bool:
    """Returns True if ``reshape`` returns a view for this input; its schema does not say."""
    if value is None or reshaped is None:  # inductor's pattern matcher sets no values
        return False
    like = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    try:
        like.view(reshaped.size())
    except (RuntimeError, ValueError):  # of kernels, and of fake tensors
        return False
    return True


def _is_cheap(node: fx.Node) -> bool:
    """Returns True for views, casts and other pointwise ops."""
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_pointwise or is_view(node) or cast_dtype(node) is not None


def read_whole(weights: Collection[fx.Node]) -> set[fx.Node]:
    """Returns the weights of which a forward kernel, generated by inductor, reads all elements.

    Such a kernel, for a norm or a penalty, reads 4 bytes of each float32 element, and casts by
    writing the 2 that a product reads: 8 bytes in every call. With a cached cast they are 6, and 6
    more after an update, so that caching pays from the fourth call per update on. What computes a
    cached value is not in such a kernel.
    """
    graph = next(iter(weights)).graph if weights else fx.Graph()
    alone, backward = set(weights), set(_tangents(graph))
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if inputs and alone.issuperset(inputs):
            alone.add(node)
        elif not backward.isdisjoint(inputs):
            backward.add(node)

    def computes_cast(node: fx.Node) -> bool:
        users = alone.intersection(node.users)
        return any(cast_dtype(user) is not None or computes_cast(user) for user in users)

    def is_in_kernel(reader: fx.Node) -> bool:
        is_fused = _FUSED.intersection(getattr(reader.target, "tags", ()))
        return bool(is_fused) and reader not in backward and not computes_cast(reader)

    return {weight for weight in weights if any(map(is_in_kernel, _readers_of_all(weight)))}


_FUSED = {torch.Tag.pointwise, torch.Tag.reduction}


def convolution_biases(weights: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the weights that only convolutions read, as biases after a cast.

    On accelerators, inductor adds the bias in the kernel after the convolution, which casts it at
    no cost. To cache the cast would take one more launch after each update.
    """

    def is_bias(cast: fx.Node) -> bool:
        return cast_dtype(cast) is not None and all(
            user.target is aten.convolution.default and user.args[2] is cast for user in cast.users
        )

    return {weight for weight in weights if weight.users and all(map(is_bias, weight.users))}


def _tangents(graph: fx.Graph) -> list[fx.Node]:
    """Returns the inputs of a joint graph of AOTAutograd that are gradients of its outputs."""
    return [node for node in graph.find_nodes(op="placeholder") if "tangents" in node.name]


def _readers_of_all(weight: fx.Node) -> Iterable[fx.Node]:
    """Yields the nodes that read a weight, directly or through views of all its elements."""
    pending = [weight]
    while pending:
        for user in pending.pop().users:
            if is_view(user) and VALUE.of(user).numel() == VALUE.of(weight).numel():
                pending.append(user)
            elif cast_dtype(user) is None:
                yield user


def copy_prepared(
    gm: fx.GraphModule, sources: Copies, prepare: Prepare, *, skipped: Collection[fx.Node] = ()
) -> Copies:
    """Copies every node that depends on weights alone into ``prepare``.

    Args:
        gm: A graph whose nodes have their values in ``meta["val"]``.
        sources: Nodes of ``gm`` that are weights or cached values, with their copies.
        prepare: The graph that receives the copies.
        skipped: Nodes that are not copied.

    Nodes whose results take more memory than the weights and than the sources that they depend on
    are not copied either.

    Returns:
        The copies by node, including those of ``sources``.
    """
    copies = dict(sources)
    read: dict[fx.Node, frozenset[fx.Node]] = {node: frozenset((node,)) for node in sources}
    for node in gm.graph.nodes:
        if node in copies or node in skipped:
            continue
        if node.op == "get_attr":
            constant = _attribute(gm, str(node.target))
            if isinstance(constant, torch.Tensor):
                copies[node] = prepare.add(node, copies, constant)
                read[node] = frozenset()
        elif is_preparable(node, copies):
            copy = prepare.add(node, copies)
            read[node] = frozenset().union(*map(read.__getitem__, node.all_input_nodes))
            # Weights that inductor joins can be larger than the one weight they come from.
            if _fits(node, prepare.weights_of(copy)) or _fits(node, read[node]):
                copies[node] = copy
    return copies


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    attribute: Any = gm
    for name in target.split("."):
        attribute = getattr(attribute, name, None)
    return attribute


def is_preparable(node: fx.Node, known: Collection[fx.Node]) -> bool:
    """Returns True for a pure op that reads nothing but nodes known to depend on weights alone."""
    if node.op != "call_function" or not is_pure(node):
        return False
    values = tensors_in(VALUE.get(node))
    # Ops that pack weights have no fake kernels, so their nodes have no values.
    if any(map(is_symbolic, values)) or (VALUE.is_on(node) and not values):
        return False
    return all(source in known for source in node.all_input_nodes)


def _fits(node: fx.Node, sources: Collection[fx.Node]) -> bool:
    """Returns True if the result takes no more memory than what it is computed from.

    Args:
        node: An op.
        sources: The weights, or the existing values, that it depends on.
    """
    if not sources or is_view(node):
        return True  # a tensor constructor has no sources; the nodes that read it need the copy
    size = sum(map(num_bytes, tensors_in(VALUE.get(node))))
    return size <= sum(num_bytes(VALUE.of(source)) for source in sources)


def values_read(
    copies: Copies, prepare: Prepare, sources: Collection[fx.Node], *, has_views: bool
) -> list[fx.Node]:
    """Returns the copied nodes that the rest of the graph reads.

    Args:
        copies: Nodes that depend on weights alone, with their copies.
        prepare: The graph that contains the copies.
        sources: Nodes that need no computation: weights and existing values.
        has_views: Whether to return a view that is read; otherwise returns the base of the view.
    """
    values: dict[fx.Node, None] = {}
    for node in copies:
        if all(user in copies for user in node.users):
            continue
        base = node if has_views else viewed_by(node)
        if base not in sources and prepare.weights_of(copies[base]):
            values[base] = None
    return list(values)


def viewed_by(node: fx.Node) -> fx.Node:
    """Returns the base of a chain of views; any other node itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def escaping(gm: fx.GraphModule, num_returned: int) -> set[fx.Node]:
    """Returns the nodes whose results are returned to the caller, directly, in part or as views.

    A caller may write to its results, so cached values must not be among them.

    Args:
        gm: A graph of AOTAutograd.
        num_returned: Number of outputs that are returned to the caller; later ones are saved for
            the backward.
    """
    outputs = pytree.tree_leaves(
        gm.graph.output_node().args, is_leaf=lambda value: isinstance(value, fx.Node)
    )
    escaping_nodes: set[fx.Node] = set()
    for output in outputs[:num_returned]:
        node = output
        while isinstance(node, fx.Node) and node not in escaping_nodes:
            escaping_nodes.add(node)
            is_part = node.target is operator.getitem  # of the results of another node
            node = node.all_input_nodes[0] if is_part or is_view(node) else None
    return escaping_nodes


def computed_outputs(gm: fx.GraphModule, num_returned: int) -> list[int]:
    """Returns the positions of outputs that are returned to the caller and not views of inputs."""
    return [i for i in range(num_returned) if not _is_view_of_input(gm, i)]


def saved_inputs(gm: fx.GraphModule, num_returned: int) -> list[int]:
    """Returns the positions of outputs that are saved for the backward and are views of inputs."""
    num_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    return [i for i in range(num_returned, num_outputs) if _is_view_of_input(gm, i)]


def _is_view_of_input(gm: fx.GraphModule, position: int) -> bool:
    output: Any = gm.graph.output_node().args[0][position]  # type: ignore[index]
    return isinstance(output, fx.Node) and viewed_by(output).op == "placeholder"


def copy_returned_inputs(gm: fx.GraphModule) -> None:
    """Copies the gradients of a backward graph that are tensors which the forward saved.

    A caller may write to a gradient, and the saved tensor may be a cached value: see
    Note [Cached values are read-only]. A gradient of an output that is passed on is not copied.
    """
    output = gm.graph.output_node()
    gradients = set(_tangents(gm.graph))

    def copied(node: fx.Node) -> fx.Node:
        base = viewed_by(node)
        if base.op != "placeholder" or base in gradients or not tensors_in(VALUE.get(node)):
            return node
        with gm.graph.inserting_before(output):
            copy = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
        VALUE.put(copy, VALUE.of(node).clone())
        return copy

    returned = {node: copied(node) for node in output.all_input_nodes}
    if any(node is not copy for node, copy in returned.items()):
        output.args = map_arg(output.args, returned.__getitem__)
        gm.graph.lint()
        gm.recompile()


def written_inputs(gm: fx.GraphModule) -> set[fx.Node]:
    """Returns the placeholders that a graph writes, directly or through views."""
    written: set[fx.Node] = set()
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        for parameter, argument in zip(schema.arguments, node.args, strict=False):
            if parameter.is_write and isinstance(argument, fx.Node):
                written.add(viewed_by(argument))
    return {node for node in written if node.op == "placeholder"}


def cached_nodes(
    gm: fx.GraphModule, sources: Copies, prepare: Prepare, num_returned: int
) -> Copies:
    """Returns the nodes whose results are cached, with their copies in ``prepare``.

    Args:
        gm: A graph of AOTAutograd, forward or joint.
        sources: Its weights, with their placeholders in ``prepare``.
        prepare: Receives copies of all nodes that depend on weights alone.
        num_returned: Number of outputs that are returned to the caller.
    """
    returned = escaping(gm, num_returned) - set(gm.graph.find_nodes(op="placeholder"))
    copies = copy_prepared(gm, sources, prepare, skipped=returned)
    return {n: copies[n] for n in values_read(copies, prepare, sources, has_views=False)}


def weights_in(gm: fx.GraphModule, weights: Iterable[int], prepare: Prepare) -> Copies:
    """Returns the placeholders of weights that a graph does not write, with their copies."""
    placeholders, written = gm.graph.find_nodes(op="placeholder"), written_inputs(gm)
    pairs = [(placeholders[i], i) for i in weights if placeholders[i] not in written]
    return {node: prepare.weight(i, VALUE.of(node)) for node, i in pairs}


@dataclasses.dataclass(frozen=True)
class Split:
    """Inputs and cached values of a split graph.

    Attributes:
        values: The cached values; their outputs are, in order, the last inputs of the rest.
        passed: Positions of the original inputs that the rest still takes, before the values.
    """

    values: tuple[CachedValueSpec, ...]
    passed: tuple[int, ...]


def split(gm: fx.GraphModule, weights: Mapping[int, str], num_returned: int) -> Split | None:
    """Splits a graph; its cached values become inputs after the others.

    Args:
        gm: A forward graph of AOTAutograd, which is edited into the rest.
        weights: Names of the weights by their positions among the inputs.
        num_returned: Number of outputs that are returned to the caller.

    Returns:
        The inputs of the rest; None, with the graph unchanged, if nothing can be cached.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    prepare = Prepare(weights)
    sources = weights_in(gm, weights, prepare)
    bases = cached_nodes(gm, sources, prepare, num_returned)
    if not bases:
        return None
    by_copy: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for base, copy in bases.items():  # equal nodes share a copy
        by_copy[copy].append(base)
    specs = prepare.specs(by_copy)
    last = placeholders[-1]
    for spec in specs:
        for output in spec.outputs:
            first = by_copy[output][0]
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(f"{first.name}_cached")
            last.meta = {k: v for k, v in first.meta.items() if k != "recompute"}
            for base in by_copy[output]:
                base.replace_all_uses_with(last)
    gm.graph.eliminate_dead_code()
    read = [node for node in sources if node.users]
    specs += [prepare.alias(sources[node]) for node in read]
    for node in read:
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"{node.name}_alias")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
    passed = []
    for i, node in enumerate(placeholders):
        if node in sources:
            gm.graph.erase_node(node)
        else:
            passed.append(i)
    gm.graph.lint()
    gm.recompile()
    return Split(tuple(specs), tuple(passed))
