"""Sizes of tensors. Symbolic sizes have the values of the call that is being compiled."""

from __future__ import annotations

import math
from typing import Any

import torch


def num_bytes(tensor: torch.Tensor) -> int:
    """Returns the memory of a tensor's elements in bytes."""
    return num_elements(tensor) * tensor.dtype.itemsize


def num_elements(tensor: torch.Tensor) -> int:
    """Returns the number of elements of a tensor."""
    if tensor.layout is torch.jagged:
        tensor = tensor.values()  # the ragged size is no number
    elif tensor.is_nested:
        return tensor.numel()
    return int(math.prod(map(hint, tensor.shape)))


def hint(value: Any) -> Any:
    """Returns the hint of a symbolic number, 1 if it has none; any other value unchanged."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    # A size that depends on data has no hint.
    number = value.node.hint if value.node.has_hint() else None
    return 1 if number is None else number
