"""Converts constant weights to channels-last if inductor's convolutions use that layout.

Before:
    %y    = aten.convolution(%x, %frozen, ...)
After:
    %laid = aten.clone(%frozen, memory_format=torch.channels_last)
    %y    = aten.convolution(%x, %laid, ...)

Generated code would otherwise convert the weight in every call. Inductor's own pass
(``convert_conv_weights_to_channels_last``) also fixes the layouts of outputs, by ops which hide
from later passes that their inputs are returned; recorded strides fix these layouts already.

Left unchanged: weights that are channels-last, and weights of one- and three-dimensional
convolutions. ``lay_out_convolutions`` converts weights that are not constants.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult

if TYPE_CHECKING:
    from torch import fx

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class LayOutConstants:
    """Adds a channels-last copy of the weight before each two-dimensional convolution."""

    name: ClassVar[str] = "lay_out_constants"
    ops: ClassVar[frozenset[str]] = frozenset({"aten::convolution"})

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``laid_out_constants``."""
        from amp_fx.torch_private.inductor import freezing

        counts: Counter[str] = Counter()
        for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
            weight = node.all_input_nodes[1]
            value: torch.Tensor = VALUE.of(weight)
            if value.dim() != 4 or value.is_contiguous(memory_format=torch.channels_last):
                continue
            with gm.graph.inserting_before(node):
                laid = gm.graph.call_function(
                    aten.clone.default, (weight,), {"memory_format": torch.channels_last}
                )
            VALUE.put(laid, value.clone(memory_format=torch.channels_last))
            node.replace_input_with(weight, laid)
            counts["laid_out_constants"] += 1
        if counts:
            # The arguments of ``as_strided`` are only right for the layout of its input.
            freezing.enforce_as_strided_input_layout(gm)
        return PassResult(counts)
