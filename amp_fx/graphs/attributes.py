"""Makes inputs of the tensors that a captured graph holds as attributes.

Dynamo captures weights as inputs, but as attributes where
``torch._inductor.config.freezing`` or ``torch._dynamo.config.prepare_freezing`` is on; it then
guards their identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amp_fx.graphs.graph_copy import copy_graph_module

if TYPE_CHECKING:
    from torch import fx


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
