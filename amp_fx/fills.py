"""Fill values that Python code took from a dtype, while Dynamo captured another one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_aggregate

from amp_fx.values import captured_value, dtypes_differ, tensors_in, value_of

if TYPE_CHECKING:
    from torch import fx

_FILLS = ("masked_fill", "masked_fill_", "index_fill", "index_fill_", "fill_", "where", "clamp")


def clamp_fill_value(node: fx.Node) -> None:
    """Keeps a baked fill value inside the range of a tensor that became narrower.

    ``mask.masked_fill(m, torch.finfo(x.dtype).min)`` was captured with float32's minimum;
    with float16 inputs the program would have asked for float16's.
    """
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name not in _FILLS:
        return
    changed = [
        t
        for n in node.all_input_nodes
        if dtypes_differ(captured_value(n), value_of(n))
        for t in tensors_in(value_of(n))
    ]
    limit = min(torch.finfo(t.dtype).max for t in changed if t.is_floating_point())

    def clamp(arg: Any) -> Any:
        if isinstance(arg, (int, float)) and not isinstance(arg, bool) and math.isfinite(arg):
            return type(arg)(max(-limit, min(limit, arg)))
        return arg

    node.args = map_aggregate(node.args, clamp)
    node.kwargs = map_aggregate(node.kwargs, clamp)
