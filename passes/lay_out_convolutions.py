"""Converts cached convolution weights to channels-last if inductor's convolutions use that layout.

Before:
    %low = prims.convert_element_type(%weight, torch.bfloat16)
    %y   = aten.convolution(%x, %low, ...)
After:
    %low  = prims.convert_element_type(%weight, torch.bfloat16)
    %laid = aten.clone(%low, memory_format=torch.channels_last)
    %y    = aten.convolution(%x, %laid, ...)

Generated code would otherwise convert the cached value in every call. Left alone on purpose: values
with other users, weights that are not contiguous, and weights whose strides fit both layouts.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult
from amp_fx.weights.plan import plan

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition
    from amp_fx.weights.inputs import Candidates

aten = torch.ops.aten

_WEIGHT_AT: dict[Any, int] = {aten.convolution.default: 1, aten.convolution_backward.default: 2}


@dataclasses.dataclass(frozen=True)
class LayOutConvolutions:
    """Adds a channels-last copy after each cached value that only convolutions read.

    Relies on ``torch._inductor.graph.GraphLowering.decide_layout_opt``.

    Attributes:
        candidates: The weights of the graph, which is a forward or a joint graph of AOTAutograd.
        num_returned: Number of outputs that are returned to the caller.
        is_inference: Whether the graph has no gradients.
    """

    name: ClassVar[str] = "lay_out_convolutions"
    ops: ClassVar[frozenset[str]] = frozenset(op._schema.name for op in _WEIGHT_AT)
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    ensures: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    candidates: Candidates = dataclasses.field(repr=False)
    num_returned: int = dataclasses.field(repr=False)
    is_inference: bool = dataclasses.field(repr=False)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``laid_out_weights``."""
        from amp_fx.torch_private.inductor import GraphLowering

        counts: Counter[str] = Counter()
        if not self.candidates.weights:
            return PassResult(counts)
        weights = [n for n in plan(gm, self.candidates, self.num_returned).nodes if _is_weight(n)]
        if not weights or not GraphLowering.decide_layout_opt(gm, is_inference=self.is_inference):
            return PassResult(counts)
        for node in weights:
            with gm.graph.inserting_after(node):
                laid = gm.graph.call_function(
                    aten.clone.default, (node,), {"memory_format": torch.channels_last}
                )
            VALUE.put(laid, VALUE.of(node).clone(memory_format=torch.channels_last))
            node.replace_all_uses_with(laid, functools.partial(operator.is_not, laid))
            counts["laid_out_weights"] += 1
        return PassResult(counts)


def _is_weight(node: fx.Node) -> bool:
    """Returns True if a node is contiguous and only read as the weight of convolutions."""
    value = VALUE.get(node)
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or not value.is_contiguous():
        return False
    is_channels_last = value.is_contiguous(memory_format=torch.channels_last)
    return not is_channels_last and all(_reads_weight(user, node) for user in node.users)


def _reads_weight(user: fx.Node, node: fx.Node) -> bool:
    position = _WEIGHT_AT.get(user.target)
    return [i for i, argument in enumerate(user.args) if argument is node] == [position]
