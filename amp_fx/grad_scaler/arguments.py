"""Checks of the arguments that torch's scaler lacks."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from amp_fx.errors import OptionError, ScalerAssertionError

_FLOAT32 = torch.finfo(torch.float32)


def scale(value: Any, name: str) -> float:
    """Checks that a value and its reciprocal are positive normal numbers in float32."""
    number = _number(value)
    if not _FLOAT32.tiny <= number <= _FLOAT32.max:  # also rejects NaN
        raise OptionError(
            f"{name} must be between {_FLOAT32.tiny:.3g} and {_FLOAT32.max:.3g}, the range of "
            f"float32; got {value!r}."
        )
    return number


def limits(min_scale: Any, max_scale: Any, init_scale: float) -> tuple[float, float]:
    """Checks the limits of the scale, which the initial scale is between."""
    lowest = scale(min_scale, "min_scale")
    highest = math.inf if max_scale in (None, math.inf) else scale(max_scale, "max_scale")
    if highest < lowest:
        raise OptionError(f"max_scale must be at least min_scale, {lowest}; got {highest}.")
    if not lowest <= init_scale <= highest:
        raise OptionError(
            f"init_scale must be between min_scale, {lowest}, and max_scale, {highest}; got "
            f"{init_scale}."
        )
    return lowest, highest


def growth_factor(value: Any) -> float:
    """Checks the factor by which the scale grows."""
    if not 1.0 < _number(value) < math.inf:
        raise ScalerAssertionError(f"The growth factor must be > 1.0, and finite; got {value!r}.")
    return _number(value)


def backoff_factor(value: Any) -> float:
    """Checks the factor by which the scale shrinks."""
    if not 0.0 < _number(value) < 1.0:
        raise ScalerAssertionError(f"The backoff factor must be < 1.0, and > 0.0; got {value!r}.")
    return _number(value)


def count(value: Any, name: str, least: int = 1) -> int:
    """Checks a number of updates."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name} must be an integer of at least {least}; got {value!r}.")
    return int(value)


def clipping(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Checks the maximum norm, which may be a tensor, and its order, which may be "inf"."""
    largest, order = _number(max_norm), _number(norm_type)
    if math.isnan(order) or not largest >= 0.0:
        raise OptionError(
            "max_norm must be a number of at least 0, and norm_type the order of a norm, such as "
            f"2.0 or inf; got {max_norm!r} and {norm_type!r}."
        )
    return largest, order


def _number(value: Any) -> float:
    """Returns a number as a float; NaN for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.item())
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return float(value) if is_number or value == "inf" else math.nan
