"""Copies a captured graph, so that Dynamo's own stays as Dynamo made it.

Dynamo goes on reading its graph after the backend returns (it builds guards from the
placeholders), and a graph that turns out not to be rewritable is taken from it afresh.
"""

from __future__ import annotations

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
