"""Node data for Google's Model Explorer: the dtype and the policy of each node.

The format is that of ``model_explorer.node_data_builder.GraphNodeData`` as JSON. Model Explorer
shows it on the nodes of an open graph that have the same names, such as those of the exported
program that was explained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_fx.reports import COLORS, OTHER_COLOR

if TYPE_CHECKING:
    from amp_fx.explanation.records import GraphRecord


def node_data(record: GraphRecord) -> dict[str, Any]:
    """Returns the node data of a graph.

    The value of a node is its dtype and the reason, such as ``"bfloat16: lower_precision_fp"`` or
    ``"float32: fp32 (module 'head')"``. Its color is that of the dtype in ``amp_fx.draw``.
    """
    results = {
        node.name: {
            "value": f"{node.dtype}: {node.treatment or node.reason}",
            "bgColor": COLORS.get(node.dtype, OTHER_COLOR),
        }
        for node in record.nodes
        if node.dtype
    }
    return {
        "name": "amp_fx",
        "results": results,
        # On a closed module: how many of its nodes have each value.
        "showExpandedSummaryOnGroupNode": True,
        "showLabelCountColumnsInChildrenStatsTable": True,
    }
