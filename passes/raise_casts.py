"""Moves narrowing casts in front of views, so that the producer's kernel writes the low dtype.

Before:
    %wide = aten.mul.Tensor(%gradient, %scale)
    %rows = aten.reshape(%wide, [8, 320, 64, 64])
    %low  = prims.convert_element_type(%rows, torch.bfloat16)
After:
    %wide = aten.mul.Tensor(%gradient, %scale)
    %low  = prims.convert_element_type(%wide, torch.bfloat16)
    %rows = aten.reshape(%low, [8, 320, 64, 64])

Left unchanged: views with other readers; views of a part of a tensor, because casting the whole
tensor would be more work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_fx.graphs.casts import WHOLE_VIEWS, evaluate, is_reinterpreting, narrowing_cast, narrows
from amp_fx.graphs.collectives import op_name
from amp_fx.graphs.metadata import VALUE

if TYPE_CHECKING:
    from torch import fx

VIEWS = WHOLE_VIEWS | {"aten::clone", "aten::expand"}
"""Ops that return all elements of one tensor unchanged."""


def raise_casts(graph: fx.Graph) -> int:
    """Moves casts of an AOTAutograd graph in front of views; returns the number of such views.

    No bits change. Inductor does not always fuse across a view; without fusion, the wide value
    would be written to memory and read again.
    """
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
            break  # the source was widened from this dtype, so that no cast was needed
        cast = raised
    return num_views


def _is_view(node: fx.Node) -> bool:
    is_known = op_name(node) in VIEWS and not is_reinterpreting(node)
    return is_known and len(node.all_input_nodes) == 1
