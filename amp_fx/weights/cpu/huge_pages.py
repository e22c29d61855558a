"""Memory in huge pages, in which a processor streams large weights faster.

A stream through small pages spends its time on the look-ups of addresses. Linux has huge pages of
2 MiB for memory that asks for them (``madvise``), unless they are off
(``/sys/kernel/mm/transparent_hugepage/enabled``).
"""

from __future__ import annotations

import mmap

import torch

HUGE_PAGE = 2**21
"""Bytes of a huge page, on x86 and usually on ARM."""


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor in huge pages; the tensor itself if it would not use any.

    A huge page that would be less than half full is left to small ones.

    Args:
        tensor: Is not a view of a larger tensor.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    num_pages = round(num_bytes / HUGE_PAGE)
    if not is_plain or tensor.device.type != "cpu" or num_pages == 0:
        return tensor
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    if not is_dense or not hasattr(mmap, "MADV_HUGEPAGE"):
        return tensor
    # Linux aligns a mapping to huge pages if its length is a multiple of them. What nothing writes
    # to takes no memory.
    length = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE, 0, num_pages * HUGE_PAGE)
    except OSError:  # this kernel has none
        return tensor
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel())
    return flat.as_strided(tensor.size(), tensor.stride()).copy_(tensor)
