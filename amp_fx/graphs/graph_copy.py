"""Copies a captured graph, so that Dynamo's own stays as Dynamo made it.

Dynamo goes on reading its graph after the backend returns (it builds guards from the
placeholders), and a graph that turns out not to be rewritable is taken from it afresh.

``with_attributes_as_inputs`` makes inputs of the tensors that a captured graph holds as attributes.

Dynamo captures weights as inputs, but as attributes where
``torch._inductor.config.freezing`` or ``torch._dynamo.config.prepare_freezing`` is on; it then
guards their identity.
"""

from __future__ import annotations

import torch
from torch import fx


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
    """A graph that takes its tensors as further inputs, and those tensors.

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
    return gm, tuple(_attribute(gm, name) for name in inputs)


def _is_tensor(gm: fx.GraphModule, node: fx.Node) -> bool:
    return isinstance(_attribute(gm, str(node.target)), torch.Tensor)


def _attribute(gm: fx.GraphModule, name: str) -> torch.Tensor:
    value = gm
    for part in name.split("."):
        value = getattr(value, part)
    return value  # type: ignore[return-value]


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
