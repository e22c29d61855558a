"""Rounds the float32 biases that kernels do not take (``fold_batch_norms`` makes them).

Before:
    %y = aten.convolution(%x, %weight, %bias, ...)     # %bias is float32, %x is bfloat16
After:
    %low = prims.convert_element_type(%bias, torch.bfloat16)
    %y   = aten.convolution(%x, %weight, %low, ...)

These are biases of convolutions that were not packed, and of those to whose result a tensor is
added: inductor gives both to one kernel, which checks the dtype of the bias. If it gives other ops
to such a kernel, ``float32_biases`` in ``amp_fx.torch_private.patches`` rounds.

Left unchanged: biases of packed convolutions, which add a float32 bias before they round.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from amp_fx.graphs.casts import CONVERT, add_call
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult
from amp_fx.passes.fold_batch_norms import has_onednn

if TYPE_CHECKING:
    from torch import fx

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class RoundBiases:
    """Casts float32 biases of low-precision convolutions."""

    name: ClassVar[str] = "round_biases"
    ops: ClassVar[frozenset[str]] = frozenset(
        {"aten::convolution", "mkldnn::_convolution_pointwise"}
    )
    is_needed: ClassVar[bool] = True

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``rounded_biases``."""
        counts: Counter[str] = Counter()
        if not has_onednn():  # then there are neither such biases nor packed convolutions
            return PassResult(counts)
        graph, packed = gm.graph, torch.ops.mkldnn._convolution_pointwise.default
        for op in (aten.convolution.default, packed):
            for convolution in graph.find_nodes(op="call_function", target=op):
                bias: Any = convolution.args[2]
                is_added_to = [user.target for user in convolution.users] == [aten.add.Tensor]
                takes_float32 = op is packed and not is_added_to
                if takes_float32 or bias is None:
                    continue
                value = VALUE.get(bias)
                if value is None:  # inductor's own folding, which rounds biases, sets none
                    continue
                dtype = VALUE.of(convolution.all_input_nodes[0]).dtype
                if value.dtype == dtype:
                    continue
                with graph.inserting_before(convolution):
                    rounded = add_call(graph, CONVERT, bias, dtype)
                convolution.update_arg(2, rounded)
                counts["rounded_biases"] += 1
        return PassResult(counts)
