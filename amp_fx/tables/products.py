"""Policies that are for products alone, and the ops that can have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.float8 import PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

FLOAT32_PRODUCTS = tuple(op for op in PRODUCTS if op != "aten::_grouped_mm")
"""Products that can give float32; kernels of grouped products give bfloat16 alone."""

PRODUCT_POLICIES: Mapping[CastPolicy, Collection[str]] = {
    CastPolicy.FLOAT8: PRODUCTS,
    CastPolicy.LOWER_PRECISION_WIDE: FLOAT32_PRODUCTS,
    CastPolicy.BFLOAT16X3: FLOAT32_PRODUCTS,
}
"""The ops that can have a policy for products. Where a module or a rule has such a policy, other
ops are treated as the tables say."""

MODULE_PRESETS: Mapping[str, Mapping[str, CastPolicy]] = {
    "router": {r"re:(.*\.)?(router|gate)": CastPolicy.LOWER_PRECISION_WIDE},
    "head": {
        r"re:(.*\.)?(lm_head|embed_out|head|score|classifier)": CastPolicy.LOWER_PRECISION_WIDE
    },
}
"""Presets that are torch's tables with a policy for modules, by the names that they have in
transformers, timm and torchtitan: routers of mixtures of experts, and output heads."""
