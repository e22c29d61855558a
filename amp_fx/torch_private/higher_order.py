"""Implementations of higher-order ops that call other ops."""

from __future__ import annotations

from torch._higher_order_ops.flex_attention import sdpa_dense
from torch._higher_order_ops.map import map_dense
from torch._higher_order_ops.scan import generic_scan

__all__ = ("generic_scan", "map_dense", "sdpa_dense")
