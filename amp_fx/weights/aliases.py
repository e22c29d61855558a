"""Memory that nodes of AOTAutograd's graphs share with inputs and results."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from amp_fx.graphs.metadata import VALUE
from amp_fx.torch_private import pytree

aten = torch.ops.aten


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


def tangents(graph: fx.Graph) -> list[fx.Node]:
    """Returns the inputs of a joint graph of AOTAutograd that are gradients of its outputs."""
    return [node for node in graph.find_nodes(op="placeholder") if "tangents" in node.name]
