"""Rejects joint graphs whose products have inputs of several floating-point dtypes.

Before and after: the same graph. The caller traces the backward inside of the region instead
(``amp_fx.backend.backward``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from amp_fx.errors import AmpFxError
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.values import argument_values, tensors_in
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from torch import fx

aten = torch.ops.aten

_PRODUCTS = (
    aten.addmm.default,
    aten.addmv.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten.mm.default,
    aten.mv.default,
)
"""Ops whose kernels require inputs of one dtype, while their fake kernels accept several."""


class MixedDtypesError(AmpFxError):
    """A product of a joint graph has inputs of several floating-point dtypes."""


@dataclasses.dataclass(frozen=True)
class RefuseMixedDtypes:
    """Raises ``MixedDtypesError`` for a product that kernels would reject."""

    name: ClassVar[str] = "refuse_mixed_dtypes"
    ops: ClassVar[frozenset[str]] = frozenset(op._schema.name for op in _PRODUCTS)
    is_needed: ClassVar[bool] = True

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts nothing."""
        nodes = [node for graph in graphs_in(gm) for node in graph.nodes]
        for node in [node for node in nodes if node.target in _PRODUCTS]:
            inputs = tensors_in(*argument_values(node))
            if len({value.dtype for value in inputs if value.is_floating_point()}) > 1:
                raise MixedDtypesError(f"{node.format_node()} has inputs of several dtypes")
        return PassResult(Counter())
