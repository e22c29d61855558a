"""Computes nodes that depend on constants alone, and makes their results constants.

Before:
    %frozen = get_attr[_frozen_param0]
    %low    = prims.convert_element_type(%frozen, torch.bfloat16)
    %y      = aten.mm(%x, %low)
After:
    %frozen = get_attr[_frozen_param1]
    %y      = aten.mm(%x, %frozen)

Left unchanged: results that the graph returns, that are larger than their weights, or that do not
depend on weights (``amp_fx.weights.plan``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.weights.pack import Constants


@dataclasses.dataclass(frozen=True)
class FoldConstants:
    """Folds constants, and records how each new one is computed.

    Attributes:
        constants: The constants of the graph.
    """

    name: ClassVar[str] = "fold_constants"
    is_needed: ClassVar[bool] = True
    constants: Constants = dataclasses.field(repr=False)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``folded_constants``."""
        return PassResult(Counter(folded_constants=self.constants.fold(gm)))
