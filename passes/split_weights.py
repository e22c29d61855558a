"""Turns values that depend on weights alone into inputs of the graph.

Before:
    graph(weight, x):
        %cast = prims.convert_element_type(%weight, torch.bfloat16)
        %y    = aten.mm(%x, %cast)
After:
    graph(x, cast_cached):
        %y    = aten.mm(%x, %cast_cached)

What stays in the graph, and why, is in ``amp_fx.weights.split``. The plan of the graph describes
how the caller computes the new inputs (``amp_fx.weights.plan``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.passes.base import PassResult
from amp_fx.weights.plan import PLAN, plan
from amp_fx.weights.split import split

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition
    from amp_fx.weights.inputs import Candidates


@dataclasses.dataclass(frozen=True)
class SplitWeights:
    """Plans what a graph caches, and splits it.

    Attributes:
        candidates: The weights of the graph, which is a forward graph of AOTAutograd.
        num_returned: Number of outputs that are returned to the caller.
    """

    name: ClassVar[str] = "split_weights"
    is_needed: ClassVar[bool] = True
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    ensures: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    candidates: Candidates = dataclasses.field(repr=False)
    num_returned: int = dataclasses.field(repr=False)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``cached_values``."""
        gm.meta[PLAN] = planned = plan(gm, self.candidates, self.num_returned)
        if planned.nodes:
            split(gm, planned)
        return PassResult(Counter(cached_values=len(planned.computed)))
