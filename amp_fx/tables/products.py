"""Policies that only apply to products, and the ops that support them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.float8 import FLOAT8_PRODUCTS, PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

PRODUCT_POLICIES: Mapping[CastPolicy, Collection[str]] = {
    CastPolicy.FLOAT8: FLOAT8_PRODUCTS,
    CastPolicy.LOWER_PRECISION_WIDE: PRODUCTS,
}
"""The ops that support each policy for products. If a module has such a policy, other ops follow
the tables."""

MODULE_PRESETS: Mapping[str, Mapping[str, CastPolicy]] = {
    "router": {r"re:(.*\.)?(router|gate)": CastPolicy.LOWER_PRECISION_WIDE},
    "head": {
        r"re:(.*\.)?(lm_head|embed_out|head|score|classifier)": CastPolicy.LOWER_PRECISION_WIDE
    },
}
"""Presets with torch's tables and a policy for modules with common names (from transformers, timm
and torchtitan): routers of mixtures of experts, and output heads."""
