"""Graphs inside higher-order ops: where they and their operands stand among the arguments.

Copies captured graphs, too, so that Dynamo's own stays as Dynamo made it.
Dynamo goes on reading its graph after the backend returns (it builds guards from the
placeholders), and a graph that turns out not to be rewritable is taken from it afresh.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.graphs.metadata import HAS_REWRITTEN_BODIES
from amp_fx.torch_private.autocast import enter_autocast
from amp_fx.torch_private.ops import HigherOrderOperator

if TYPE_CHECKING:
    from collections.abc import Collection


def graphs_in(gm: fx.GraphModule) -> list[fx.Graph]:
    """A graph and the graphs of bodies inside it."""
    return [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]


def enters_regions(gm: fx.GraphModule) -> bool:
    """Returns True if a graph, or a body inside it, enters an autocast region when it runs."""
    return any(g.find_nodes(op="call_function", target=enter_autocast) for g in graphs_in(gm))


_hop = torch.ops.higher_order

_BODIES: dict[Any, tuple[slice, int | None]] = {
    _hop.tag_activation_checkpoint: (slice(1), None),
    _hop.wrap: (slice(1), None),
    _hop.cond: (slice(1, 3), 3),
}
"""Higher-order ops whose bodies are plain graphs, called on operands: where the bodies
stand, and which argument is the tuple of operands; None where all others are."""


def has_plain_bodies(node: fx.Node) -> bool:
    """Returns True if a node is a higher-order op whose bodies may be rewritten."""
    return node.target in _BODIES


def argument_graphs(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Returns the graphs among the arguments of a higher-order op of any kind."""
    if not isinstance(node.target, HigherOrderOperator):
        return []
    names = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    return [
        body for name in names if isinstance(body := operator.attrgetter(name)(gm), fx.GraphModule)
    ]


def is_reentrant_checkpoint(node: fx.Node) -> bool:
    """Returns True if a node is ``torch.utils.checkpoint`` that recomputes under autograd's feet.

    Relies on Dynamo handing the checkpoint's arguments on; None means True there.
    """
    is_checkpoint = node.target is _hop.tag_activation_checkpoint
    return is_checkpoint and node.kwargs.get("use_reentrant", False) is not False


def body_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The ``get_attr`` nodes of the bodies of a higher-order op."""
    return node.args[_BODIES[node.target][0]]  # type: ignore[return-value]


def bodies_of(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The bodies of one higher-order op of ``gm``."""
    return [getattr(gm, str(body_node.target)) for body_node in body_nodes(node)]


def operands_of(node: fx.Node) -> tuple[Any, ...]:
    """Returns the operands with which a higher-order op calls its bodies."""
    bodies, position = _BODIES[node.target]
    operands: Any = node.args[bodies.stop :] if position is None else node.args[position]
    return tuple(operands)


def append_operand(node: fx.Node, operand: fx.Node) -> None:
    """Calls the bodies with one more operand; each needs a placeholder for it."""
    _, position = _BODIES[node.target]
    if position is None:
        node.args = (*node.args, operand)
    else:
        node.update_arg(position, (*operands_of(node), operand))


def drop_unused_operands(gm: fx.GraphModule, names: Collection[str]) -> None:
    """Takes out operands that no body reads, those of nested higher-order ops first.

    Args:
        gm: The graph; of it, only higher-order ops whose operands are one argument are looked at.
        names: Of the placeholders that may be taken out of the operands.
    """
    for node in gm.graph.nodes:
        position = _BODIES[node.target][1] if has_plain_bodies(node) else None
        if position is None:
            continue
        bodies = bodies_of(gm, node)
        inputs = [body.graph.find_nodes(op="placeholder") for body in bodies]
        for body, placeholders in zip(bodies, inputs, strict=True):
            passed = {
                p.name
                for p, o in zip(placeholders, operands_of(node), strict=True)
                if getattr(o, "name", None) in names
            }
            drop_unused_operands(body, passed)
        kept = []
        for index, operand in enumerate(operands_of(node)):
            placeholders = [nodes[index] for nodes in inputs]
            is_named = isinstance(operand, fx.Node) and operand.name in names
            if not is_named or any(placeholder.users for placeholder in placeholders):
                kept.append(operand)
                continue
            for body, placeholder in zip(bodies, placeholders, strict=True):
                body.graph.erase_node(placeholder)
        node.update_arg(position, tuple(kept))


def mark_rewritten(node: fx.Node) -> None:
    """Records that the bodies of a higher-order op hold casts of their own."""
    HAS_REWRITTEN_BODIES.put(node, True)


def is_rewritten(node: fx.Node) -> bool:
    """Returns True if ``mark_rewritten`` was called for a node."""
    return HAS_REWRITTEN_BODIES.is_on(node)


def rewritten_bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """The rewritten graphs inside the higher-order ops of ``gm``."""
    return [body for node in gm.graph.nodes if is_rewritten(node) for body in bodies_of(gm, node)]


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph module and of the graph modules inside it; weights are shared.

    Relies on what AOTAutograd reads of a graph by Dynamo: ``meta``,
    ``_param_name_to_source``, and ``_dynamo_source`` of its placeholders.
    """
    copy = fx.GraphModule(gm, _copy_graph(gm.graph), class_name=type(gm).__name__)
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule) and hasattr(copy, name):
            setattr(copy, name, copy_graph_module(child))
    copy.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source
    return copy


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph(owning_module=None, tracer_cls=graph._tracer_cls)
    env: dict[fx.Node, fx.Node] = {}
    output = copy.graph_copy(graph, env)
    for old, new in env.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        # Dynamo takes it off its own graph when it is done: it refers to the real inputs.
        new.meta.pop("grapharg", None)
    node = copy.output(output)
    node.meta = dict(graph.output_node().meta)
    return copy


def with_attributes_as_inputs(
    gm: fx.GraphModule,
) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """A graph that takes the tensors it has as attributes as further inputs, and those tensors.

    Dynamo captures weights as inputs, but as attributes where ``torch._inductor.config.freezing``
    or ``torch._dynamo.config.prepare_freezing`` is on; it then guards their identity.

    Returns:
        The graph itself if it holds none.
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
    place = gm.graph.inserting_after(placeholders[-1]) if placeholders else None
    with place or gm.graph.inserting_before(first):
        added = gm.graph.placeholder(f"{node.name}_attribute_{num_added}")
    added.meta.update(node.meta)
    added.meta["tensor_dict"] = {"_dynamo_static_input_type": "guarded"}
    sources = getattr(gm, "_param_name_to_source", None) or {}
    added._dynamo_source = sources.get(node.target)
    return added
