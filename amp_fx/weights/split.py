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

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.weights.plan import CachePlan


def split(gm: fx.GraphModule, plan: CachePlan) -> None:
    """Edits a graph into the rest: cached values become inputs after the others.

    Args:
        gm: A forward graph of AOTAutograd.
        plan: The plan of the same graph, which caches at least one value.
    """
    # New inputs come after all others, so that positions of the others do not change until the
    # weights are removed.
    placeholders = gm.graph.find_nodes(op="placeholder")
    by_copy: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, copy in plan.nodes.items():  # equal nodes share a copy
        by_copy[copy].append(node)
    last = placeholders[-1]
    for spec in plan.values:
        for output in spec.outputs:
            replaced = [placeholders[spec.positions[0]]] if spec.is_alias else by_copy[output]
            suffix = "alias" if spec.is_alias else "cached"
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(f"{replaced[0].name}_{suffix}")
            last.meta = {k: v for k, v in replaced[0].meta.items() if k != "recompute"}
            for node in replaced:
                node.replace_all_uses_with(last)
    # Weights can be erased once the nodes that computed the values are gone.
    gm.graph.eliminate_dead_code()
    for i in set(range(len(placeholders))).difference(plan.passed):
        gm.graph.erase_node(placeholders[i])
