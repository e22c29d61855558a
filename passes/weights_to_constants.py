"""Turns weights into constants of a graph without gradients.

Before:
    graph(weight, x):
        %y = aten.mm(%x, %weight)
After:
    graph(x):
        %frozen = get_attr[_frozen_param0]
        %y      = aten.mm(%x, %frozen)

Left unchanged: weights that the graph writes to, which the caller does not pass.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import fx

    from amp_fx.graphs.conditions import Condition
    from amp_fx.weights.pack import Constants


@dataclasses.dataclass(frozen=True)
class WeightsToConstants:
    """Replaces the placeholders of weights by constants.

    Attributes:
        constants: Records how each constant is computed.
        weights: The weights by their positions among the inputs.
    """

    name: ClassVar[str] = "weights_to_constants"
    is_needed: ClassVar[bool] = True
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    ensures: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    constants: Constants = dataclasses.field(repr=False)
    weights: Mapping[int, torch.Tensor] = dataclasses.field(repr=False)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``frozen_weights``."""
        from amp_fx.torch_private.inductor import view_to_reshape

        view_to_reshape(gm)  # type: ignore[no-untyped-call]  # packing changes strides
        placeholders = gm.graph.find_nodes(op="placeholder")
        for i, weight in self.weights.items():
            copy = self.constants.prepare.weight(i, VALUE.of(placeholders[i]))
            self.constants.put(gm, placeholders[i], weight, copy)
        return PassResult(Counter(frozen_weights=len(self.weights)))
