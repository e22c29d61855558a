"""Records the strides that the outputs of a graph have in compiled code.

Before and after: the same nodes; ``meta["original_output_strides"]`` of the output is set.

Inductor gives outputs the strides of their values at the time at which it records them. Later
passes change the layout of a convolution's weight, and with it that of its result.

Left unchanged: strides that were recorded before (``patches.repaired_inductor``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition


@dataclasses.dataclass(frozen=True)
class RecordOutputStrides:
    """Records strides before passes change layouts."""

    name: ClassVar[str] = "record_output_strides"
    is_needed: ClassVar[bool] = True
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts nothing: no node changes."""
        from amp_fx.torch_private.inductor import compile_fx_module

        compile_fx_module.record_original_output_strides(gm)
        return PassResult(Counter())
