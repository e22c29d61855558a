"""The cast policies of ATen's autocast and of amp_fx, and tables of them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeAlias


class CastPolicy(enum.Enum):
    """Effects of autocast on a call of an op.

    The names are those of ``at::autocast::CastPolicy`` in ``ATen/autocast_mode.h``. ``BANNED`` is
    the error that ``AutocastCUDA`` raises for ``binary_cross_entropy``. ``KEEP``,
    ``SAME_AS_INPUT``, ``LOWER_PRECISION_IO``, ``DEMOTE``, ``FLOAT8`` and ``LOWER_PRECISION_WIDE``
    are specific to amp_fx.
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Cast every eligible tensor input to the autocast dtype."""
    FP32 = "fp32"
    """Cast every eligible tensor input to float32."""
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Set an unset ``dtype`` argument to float32 if the first argument is eligible."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """Call the overload with a ``dtype`` argument, with float32."""
    PROMOTE = "promote"
    """Cast eligible inputs to the widest of their dtypes; float64 is ignored."""
    BANNED = "banned"
    """Raise an error, because the op is unsafe under autocast."""
    KEEP = "keep"
    """Do not change the call, and do not decompose it."""
    SAME_AS_INPUT = "same_as_input"
    """Compute in float32, and return the dtype of the first floating-point input."""
    LOWER_PRECISION_IO = "lower_precision_io"
    """Round the first tensor input to the autocast dtype, compute in float32, and return the
    autocast dtype, like a model that is stored low but has float32 weights."""
    DEMOTE = "demote"
    """Cast eligible inputs to the autocast dtype if one of them has that dtype and all have the
    same shape with two or more dimensions, such as a low branch and a float32 residual stream."""
    FLOAT8 = "float8"
    """Compute products with a weight in scaled float8. Products whose shape float8 does not support
    fall back to the autocast dtype; other ops follow the tables."""
    LOWER_PRECISION_WIDE = "lower_precision_wide"
    """Compute products of inputs in the autocast dtype, accumulate in float32, and return float32.
    Other ops follow the tables."""

    def effect(self, low: str = "the autocast dtype") -> str:
        """Describes the effect on a call in a few words.

        Args:
            low: Name of the low dtype.
        """
        return _EFFECTS[self].format(low=low)


NO_POLICY = "no policy"
"""Name of the treatment of ops that no table lists."""

_EFFECTS = {
    CastPolicy.LOWER_PRECISION_FP: "floating-point inputs go to {low}",
    CastPolicy.FP32: "floating-point inputs go to float32",
    CastPolicy.FP32_SET_OPT_DTYPE: "an unset dtype= becomes float32; inputs stay",
    CastPolicy.FP32_APPEND_DTYPE: "calls the overload with dtype=, with float32",
    CastPolicy.PROMOTE: "inputs go to the widest of their dtypes",
    CastPolicy.BANNED: "raises: unsafe under autocast",
    CastPolicy.KEEP: "left alone, and not looked into",
    CastPolicy.SAME_AS_INPUT: "computes in float32, gives back its first input's dtype",
    CastPolicy.LOWER_PRECISION_IO: "takes and gives {low}, computes in float32",
    CastPolicy.DEMOTE: "inputs of one shape go to {low} where one of them is",
    CastPolicy.FLOAT8: "a product with a weight runs in float8; others get inputs in {low}",
    CastPolicy.LOWER_PRECISION_WIDE: "a product of inputs in {low} gives float32",
}


Table: TypeAlias = Mapping[str, CastPolicy]
"""Policies by qualified overload name, such as ``"aten::softmax.int"`` or ``"aten::linear"``."""
