"""Raises narrowing casts over views, so that what makes a value can write it low.

Before:
    %wide = aten.mul.Tensor(%gradient, %scale)
    %rows = aten.reshape(%wide, [8, 320, 64, 64])
    %low  = prims.convert_element_type(%rows, torch.bfloat16)
After:
    %wide = aten.mul.Tensor(%gradient, %scale)
    %low  = prims.convert_element_type(%wide, torch.bfloat16)
    %rows = aten.reshape(%low, [8, 320, 64, 64])

Each element stays what it is. Inductor does not always fuse over a view; where it does not, the
wide value would be written and read once more. This pass runs on the graphs that AOTAutograd makes.
Left alone on purpose: views that anything else reads, and those that take a part of a tensor, as
casting all of it would be more work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_fx.graphs.casts import WHOLE_VIEWS, evaluate, is_reinterpreting, narrowing_cast, narrows
from amp_fx.graphs.collectives import op_name
from amp_fx.graphs.metadata import VALUE

if TYPE_CHECKING:
    from torch import fx

VIEWS = WHOLE_VIEWS | {"aten::clone", "aten::expand"}
"""What gives all elements of one tensor, each as it is."""


def raise_casts(graph: fx.Graph) -> int:
    """Raises the casts of a graph whose nodes have values; counts the views that they passed."""
    return sum(_raise(graph, node) for node in list(graph.nodes) if narrows(node))


def _raise(graph: fx.Graph, cast: fx.Node) -> int:
    num_views = 0
    while _is_view(view := cast.all_input_nodes[0]) and len(view.users) == 1:
        source = view.all_input_nodes[0]
        with graph.inserting_before(view):
            raised = narrowing_cast(graph, source, VALUE.of(cast).dtype, like=cast)
        view.replace_input_with(source, raised)
        evaluate(view)
        cast.replace_all_uses_with(view)
        graph.erase_node(cast)
        num_views += 1
        if not narrows(raised):
            break  # it was widened from this dtype before
        cast = raised
    return num_views


def _is_view(node: fx.Node) -> bool:
    is_known = op_name(node) in VIEWS and not is_reinterpreting(node)
    return is_known and len(node.all_input_nodes) == 1
