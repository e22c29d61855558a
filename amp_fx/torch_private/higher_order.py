"""Implementations of higher-order ops that call other ops."""

from __future__ import annotations

from torch._higher_order_ops.flex_attention import sdpa_dense
from torch._higher_order_ops.passes.inline_invoke_subgraph import (
    inline_invoke_subgraph,
    inline_single_use_invoke_subgraph,
)

__all__ = ("inline_invoke_subgraph", "inline_single_use_invoke_subgraph", "sdpa_dense")
