"""The cast policies of ATen's autocast, as an enum: what may happen to one op."""

from __future__ import annotations

import enum


class CastPolicy(enum.Enum):
    """What autocast does to a call of an op; the names are ATen's.

    Source: ``at::autocast::CastPolicy`` in ``ATen/autocast_mode.h``; ``BANNED`` is
    the error that ``AutocastCUDA`` raises for ``binary_cross_entropy``. ``KEEP`` and
    ``SAME_AS_INPUT`` are amp_fx's own: no table of PyTorch's has them.
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Cast every eligible tensor input to the autocast dtype."""
    FP32 = "fp32"
    """Cast every eligible tensor input to float32."""
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Set an unset ``dtype`` argument to float32 if the first argument is eligible."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """Call the overload that takes a ``dtype``, with float32."""
    PROMOTE = "promote"
    """Cast eligible inputs to the widest of their dtypes; float64 is ignored."""
    BANNED = "banned"
    """Raise: the op is unsafe under autocast."""
    KEEP = "keep"
    """Leave the call alone, and do not look into it."""
    SAME_AS_INPUT = "same_as_input"
    """Compute in float32, give back the dtype of the first floating-point input."""
