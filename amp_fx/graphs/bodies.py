"""Bodies and operands of higher-order ops, and copies of captured graphs."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from amp_fx.graphs.metadata import HAS_REWRITTEN_BODIES
from amp_fx.torch_private.autocast import enter_autocast
from amp_fx.torch_private.ops import HigherOrderOperator

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def graphs_in(gm: fx.GraphModule) -> list[fx.Graph]:
    """Returns the graph of a module and the graphs of all bodies inside it."""
    return [module.graph for module in graph_modules_in(gm)]


def graph_modules_in(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Returns a graph module and those of all bodies inside it."""
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def enters_regions(gm: fx.GraphModule) -> bool:
    """Returns True if a graph, or a body inside it, enters an autocast region when it runs."""
    return any(g.find_nodes(op="call_function", target=enter_autocast) for g in graphs_in(gm))


_hop = torch.ops.higher_order


class _Signature(NamedTuple):
    """Positions of the arguments of a higher-order op that calls plain graphs on operands.

    Attributes:
        bodies: Positions of the bodies.
        operands: Position of the first operand, or of the tuple of operands.
        is_tuple: Whether the operands are one tuple.
    """

    bodies: slice
    operands: int
    is_tuple: bool = False


# All other higher-order ops are opaque. Loops check the dtypes of their state, and a custom
# ``autograd.Function`` has a backward that was captured for the captured dtypes.
_BODIES: dict[Any, _Signature] = {
    _hop.tag_activation_checkpoint: _Signature(slice(1), 1),
    _hop.wrap: _Signature(slice(1), 1),
    _hop.invoke_subgraph: _Signature(slice(1), 2),
    _hop.cond: _Signature(slice(1, 3), 3, is_tuple=True),
}


WITH_PLAIN_BODIES = frozenset(op.name() for op in _BODIES)
"""Names of the higher-order ops whose bodies may be rewritten."""


def has_plain_bodies(node: fx.Node) -> bool:
    """Returns True if a node is a higher-order op whose bodies may be rewritten."""
    return node.target in _BODIES


def has_shared_body(node: fx.Node) -> bool:
    """Returns True if other calls may share the body of a node (``shared_bodies``)."""
    return node.target is _hop.invoke_subgraph


def has_shared_bodies(gm: fx.GraphModule) -> bool:
    """Returns True if a graph, or a body inside it, calls a body that other calls may share."""
    return any(
        graph.find_nodes(op="call_function", target=_hop.invoke_subgraph) for graph in graphs_in(gm)
    )


def argument_graphs(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Returns the graphs among the arguments of a higher-order op of any kind."""
    if not isinstance(node.target, HigherOrderOperator):
        return []
    names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    attributes = [operator.attrgetter(name)(gm) for name in names]
    return [attribute for attribute in attributes if isinstance(attribute, fx.GraphModule)]


def is_reentrant_checkpoint(node: fx.Node) -> bool:
    """Returns True if a node is ``torch.utils.checkpoint`` with ``use_reentrant=True``.

    Relies on Dynamo passing the arguments of the checkpoint on; None means True.
    """
    is_checkpoint = node.target is _hop.tag_activation_checkpoint
    return is_checkpoint and node.kwargs.get("use_reentrant", False) is not False


def body_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the ``get_attr`` nodes of the bodies of a higher-order op."""
    return node.args[_BODIES[node.target].bodies]  # type: ignore[return-value]


def bodies_of(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Returns the bodies of one higher-order op of ``gm``."""
    return [getattr(gm, str(body_node.target)) for body_node in body_nodes(node)]


def operands_of(node: fx.Node) -> tuple[Any, ...]:
    """Returns the operands with which a higher-order op calls its bodies."""
    _, position, is_tuple = _BODIES[node.target]
    operands: Any = node.args[position] if is_tuple else node.args[position:]
    return tuple(operands)


def append_operand(node: fx.Node, operand: fx.Node) -> None:
    """Adds an operand to a higher-order op; each body must have a placeholder for it."""
    set_operands(node, (*operands_of(node), operand))


def set_operands(node: fx.Node, operands: tuple[Any, ...]) -> None:
    """Replaces the operands of a higher-order op, one per placeholder of its bodies."""
    _, position, is_tuple = _BODIES[node.target]
    node.args = (*node.args[:position], *((operands,) if is_tuple else operands))


def drop_unused_operands(gm: fx.GraphModule, names: Collection[str]) -> None:
    """Removes operands that no body reads, starting with nested higher-order ops.

    Only affects higher-order ops whose operands are one tuple.

    Args:
        gm: The graph.
        names: Names of the nodes that may be removed from the operands.
    """
    for node in gm.graph.nodes:
        if not has_plain_bodies(node) or not _BODIES[node.target].is_tuple:
            continue
        bodies = bodies_of(gm, node)
        inputs = [body.graph.find_nodes(op="placeholder") for body in bodies]
        for body, placeholders in zip(bodies, inputs, strict=True):
            inner_names = {
                placeholder.name
                for placeholder, operand in zip(placeholders, operands_of(node), strict=True)
                if getattr(operand, "name", None) in names
            }
            drop_unused_operands(body, inner_names)
        # Nested ops come first, because an operand that only they pass on is unused after them.
        remaining = []
        for index, operand in enumerate(operands_of(node)):
            placeholders = [nodes[index] for nodes in inputs]
            is_named = isinstance(operand, fx.Node) and operand.name in names
            if not is_named or any(placeholder.users for placeholder in placeholders):
                remaining.append(operand)
                continue
            for body, placeholder in zip(bodies, placeholders, strict=True):
                body.graph.erase_node(placeholder)
        set_operands(node, tuple(remaining))


def drop_unread_operands(nodes: Iterable[fx.Node], body: fx.GraphModule) -> None:
    """Removes the operands that a body does not read from the nodes that call it.

    ``invoke_subgraph`` saves all operands for its backward.
    """
    placeholders = body.graph.find_nodes(op="placeholder")
    for node in nodes:
        pairs = zip(placeholders, operands_of(node), strict=True)
        set_operands(node, tuple(operand for inner, operand in pairs if inner.users))
    for inner in placeholders:
        if not inner.users:
            body.graph.erase_node(inner)


def rewritten_bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Returns the rewritten bodies of the higher-order ops of ``gm``."""
    callers = filter(HAS_REWRITTEN_BODIES.is_on, gm.graph.nodes)
    return [body for node in callers for body in bodies_of(gm, node)]


def calls_of_bodies(gm: fx.GraphModule) -> list[tuple[list[fx.GraphModule], list[fx.Node]]]:
    """Returns the rewritten bodies inside a graph with the nodes that call them.

    Several nodes, also of different graphs, may call one body. Bodies follow the bodies that they
    contain.
    """
    calls: dict[tuple[fx.GraphModule, ...], list[fx.Node]] = {}
    visited: set[fx.GraphModule] = set()

    def visit(graph_module: fx.GraphModule) -> None:
        # Graphs that share a body are visited once, so that each call is listed once.
        if graph_module in visited:
            return
        visited.add(graph_module)
        for node in filter(HAS_REWRITTEN_BODIES.is_on, graph_module.graph.nodes):
            bodies = bodies_of(graph_module, node)
            for body in bodies:
                visit(body)
            calls.setdefault(tuple(bodies), []).append(node)

    visit(gm)
    return [(list(bodies), nodes) for bodies, nodes in calls.items()]


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Copies a graph module and the graph modules inside it; the copy shares the weights.

    Captured graphs are copied before they are edited, because Dynamo builds guards from their
    placeholders after the backend returns. The original also serves as fallback if a rewrite fails.

    Relies on the attributes that AOTAutograd reads from Dynamo's graphs: ``meta``,
    ``_param_name_to_source``, and ``_dynamo_source`` of placeholders.
    """
    graph = fx.Graph(owning_module=None, tracer_cls=gm.graph._tracer_cls)
    env: dict[fx.Node, fx.Node] = {}
    output = graph.output(graph.graph_copy(gm.graph, env))
    output.meta = dict(gm.graph.output_node().meta)
    for old, new in env.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        # It refers to the real inputs. Dynamo removes it from its own graph later.
        new.meta.pop("grapharg", None)
    copy = fx.GraphModule(gm, graph, class_name=type(gm).__name__)
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule) and hasattr(copy, name):
            setattr(copy, name, copy_graph_module(child))
    copy.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source
    return copy


def with_attributes_as_inputs(
    gm: fx.GraphModule,
) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """Turns tensor attributes of a graph into additional inputs.

    Dynamo captures weights as inputs. With ``torch._inductor.config.freezing`` or
    ``torch._dynamo.config.prepare_freezing``, it captures them as attributes and guards their
    identity.

    Returns:
        A copy of the graph, or the graph itself if it has no such attributes, and the tensors.
    """
    if not any(_is_tensor(gm, node) for node in gm.graph.find_nodes(op="get_attr")):
        return gm, ()
    gm = copy_graph_module(gm)
    inputs: dict[str, fx.Node] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        if _is_tensor(gm, node):
            if node.target not in inputs:
                inputs[node.target] = _input_for(gm, node, len(inputs))
            node.replace_all_uses_with(inputs[node.target])
            gm.graph.erase_node(node)
    gm.recompile()
    return gm, tuple(operator.attrgetter(name)(gm) for name in inputs)


def _is_tensor(gm: fx.GraphModule, node: fx.Node) -> bool:
    return isinstance(operator.attrgetter(str(node.target))(gm), torch.Tensor)


def _input_for(gm: fx.GraphModule, node: fx.Node, num_added: int) -> fx.Node:
    placeholders = gm.graph.find_nodes(op="placeholder")
    first = next(iter(gm.graph.nodes))
    after_last = gm.graph.inserting_after(placeholders[-1]) if placeholders else None
    with after_last or gm.graph.inserting_before(first):
        added = gm.graph.placeholder(f"{node.name}_attribute_{num_added}")
    added.meta.update(node.meta)
    # As on inputs whose identity Dynamo guards: their addresses stay, which CUDA graphs rely on.
    added.meta["tensor_dict"] = {"_dynamo_static_input_type": "guarded"}
    sources = getattr(gm, "_param_name_to_source", None) or {}
    added._dynamo_source = sources.get(node.target)
    return added
