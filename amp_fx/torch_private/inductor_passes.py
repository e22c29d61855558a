"""The classes of inductor's custom passes and partitioners."""

from __future__ import annotations

from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    CustomPartitionerFn,
    get_hash_for_files,
)

__all__ = ("CustomGraphPass", "CustomPartitionerFn", "get_hash_for_files")

ROUNDED = "low_precision_pointwise_barrier"
"""Key in a node's metadata: inductor rounds its inputs and its result to their low dtypes."""
