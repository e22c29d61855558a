"""Sizes of tensors in bytes; symbolic sizes count as in the call at hand."""

from __future__ import annotations

import math
from typing import Any

import torch


def num_bytes(tensor: torch.Tensor) -> int:
    """Memory of a tensor's elements; symbolic sizes are taken as in the call at hand."""
    return num_elements(tensor) * tensor.dtype.itemsize


def num_elements(tensor: torch.Tensor) -> int:
    """Elements of a tensor, symbolic sizes as in the call at hand."""
    return int(math.prod(map(hint, tensor.shape)))


def hint(value: Any) -> Any:
    """A symbolic number as it is in the call at hand, 1 if unknown; anything else as it is."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    known = value.node.hint if value.node.has_hint() else None
    return 1 if known is None else known
