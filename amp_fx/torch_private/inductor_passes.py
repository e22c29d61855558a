"""The classes of inductor's custom passes and partitioners."""

from __future__ import annotations

from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    CustomPartitionerFn,
    get_hash_for_files,
)

__all__ = ("CustomGraphPass", "CustomPartitionerFn", "get_hash_for_files")
