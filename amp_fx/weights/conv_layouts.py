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

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.graphs.metadata import VALUE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import fx

aten = torch.ops.aten

_WEIGHT_AT: dict[Any, int] = {aten.convolution.default: 1, aten.convolution_backward.default: 2}


def lay_out_convolutions(
    gm: fx.GraphModule, values: Iterable[fx.Node], *, is_inference: bool
) -> bool:
    """Adds a channels-last copy after each value that only convolutions read.

    Relies on ``torch._inductor.graph.GraphLowering.decide_layout_opt``.

    Args:
        gm: A graph of AOTAutograd, forward or joint.
        values: Nodes of ``gm`` whose results are cached.
        is_inference: Whether the graph has no gradients.

    Returns:
        True if the graph changed.
    """
    from amp_fx.torch_private.inductor import GraphLowering

    weights = [node for node in values if _is_weight(node)]
    if not weights or not GraphLowering.decide_layout_opt(gm, is_inference=is_inference):
        return False
    for node in weights:
        with gm.graph.inserting_after(node):
            laid = gm.graph.call_function(
                aten.clone.default, (node,), {"memory_format": torch.channels_last}
            )
        VALUE.put(laid, VALUE.of(node).clone(memory_format=torch.channels_last))
        node.replace_all_uses_with(laid, functools.partial(operator.is_not, laid))
    return True


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
