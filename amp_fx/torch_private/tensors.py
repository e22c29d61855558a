"""Memory and classes of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import suggest_memory_format

__all__ = ("suggest_memory_format",)


def data_address(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's first element.

    Unlike ``data_ptr``, does not count as a write and does not materialize copy-on-write memory.
    """
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return address


def is_cow_tensor(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor shares its memory copy-on-write."""
    is_cow: bool = torch._C._is_cow_tensor(tensor)  # type: ignore[attr-defined]
    return is_cow


def group_by_device_and_dtype(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors in one C++ call, which takes 0.1 us per tensor (a Python loop takes 1 us)."""
    if not tensors:
        return []
    groups: Any = torch._C._group_tensors_by_device_and_dtype([tensors], False)  # type: ignore[list-item]
    return [lists[0] for lists, _ in groups.values()]
