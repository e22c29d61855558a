"""Scaling of outputs in any structure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from amp_fx.errors import ScalerValueError

_LOW_DTYPES = (torch.float16, torch.bfloat16)


def widen(output: Tensor) -> Tensor:
    """To float32, where scaling overflows neither float16 nor, one day, anything narrower."""
    return output.float() if output.dtype in _LOW_DTYPES else output


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each item of a container, which keeps its kind as far as it can.

    Mappings come back as dicts, iterables other than lists and tuples as iterators.

    Raises:
        ScalerValueError: the value holds nothing.
    """
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ScalerValueError(
            f"outputs must be a Tensor or an iterable of Tensors; got {type(value).__name__!r}."
        )
    if hasattr(value, "_make"):  # a named tuple
        return value._make(map(function, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(function, value))
    return map(function, value)
