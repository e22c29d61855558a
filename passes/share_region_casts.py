"""Lets a graph's casts of leaves be those of the region that the graph is called in.

Before:
    %weight_bfloat16 = aten._to_copy(%weight, dtype=torch.bfloat16)
    %y               = aten.linear(%x_bfloat16, %weight_bfloat16)
After:
    %weight_bfloat16 = aten._to_copy(%weight, dtype=torch.bfloat16)
    %weight_shared   = amp_fx.region_cast(%weight, %weight_bfloat16)
    %y               = aten.linear(%x_bfloat16, %weight_shared)

A kept cast (``amp_fx.kept_cast``) becomes ``amp_fx.region_cast`` itself. Only for the inner
compiler ``"eager"``, which runs the graph as it stands. Left alone on purpose: every cast
that eager autocast would not cache (``fold_casts``), and the bodies of higher-order ops,
from which those casts are gone (``hoist_casts``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from amp_fx.graphs.casts import inserted_cast
from amp_fx.graphs.conditions import SITES_KNOWN, VALUES_KNOWN
from amp_fx.graphs.metadata import provenance
from amp_fx.graphs.values import set_value, value_of
from amp_fx.passes.base import PassResult
from amp_fx.passes.fold_casts import has_gradient, is_aliased, is_cached_by_eager
from amp_fx.weights.kept_cast import kept_cast, region_cast

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition


@dataclasses.dataclass(frozen=True)
class ShareRegionCasts:
    """Replaces casts that eager autocast caches by the ones that it has cached."""

    name: ClassVar[str] = "share_region_casts"
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    ensures: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``region_casts``."""
        counts: Counter[str] = Counter()
        for node in list(gm.graph.nodes):
            if _is_own_cast(node) and is_cached_by_eager(node):
                _share(gm.graph, node)
                counts["region_casts"] += 1
        return PassResult(counts)


def _is_own_cast(node: fx.Node) -> bool:
    if node.target is kept_cast:
        return True
    if inserted_cast(node) is None or not has_gradient(node) or is_aliased(node):
        return False
    return all(user.target is not region_cast for user in node.users)


def _share(graph: fx.Graph, node: fx.Node) -> None:
    if node.target is kept_cast:
        node.target = region_cast
        return
    with graph.inserting_after(node):
        shared = graph.call_function(region_cast, (node.args[0], node))
    shared.meta = provenance(node)
    set_value(shared, value_of(node))
    node.replace_all_uses_with(shared, lambda user: user is not shared)
