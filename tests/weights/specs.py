"""Descriptions of cached values, made by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.graphs.casts import CONVERT
from amp_fx.graphs.metadata import VALUE
from amp_fx.weights.prepare import Prepare

if TYPE_CHECKING:
    from amp_fx.weights.prepare import CachedValueSpec


def cast_spec(
    weight: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    position: int = 0,
    name: str = "a weight",
) -> CachedValueSpec:
    """Describes the cast of a weight, as a graph that reads nothing else would."""
    prepare = Prepare({position: name})
    value: Any = torch.empty_like(weight, device="meta")
    node = prepare.graph.call_function(CONVERT, (prepare.weight(position, value), dtype))
    VALUE.put(node, value.to(dtype))
    (spec,) = prepare.specs([node])
    return spec
