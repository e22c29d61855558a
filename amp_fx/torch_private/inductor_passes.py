"""The classes of inductor's custom passes and partitioners."""

from __future__ import annotations

from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

__all__ = ("CustomGraphPass", "CustomPartitionerFn")

ROUNDED = "low_precision_pointwise_barrier"
"""Key in a node's metadata: inductor rounds its inputs and its result to their low dtypes."""

STORED = "inductor_realize_to_strides"
"""Key in a node's metadata: inductor writes its result to memory (``inductor.store_result``)."""
