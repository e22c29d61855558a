"""Converts names of dtypes, and recognizes low-precision dtypes and DTensors."""

from __future__ import annotations

import sys

import torch

SHORT_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Common names of dtypes that are not attributes of torch, unlike ``half``."""


def dtype_name(dtype: torch.dtype | None) -> str:
    """Returns the name of a dtype, such as ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def as_dtype(value: object) -> torch.dtype | None:
    """Converts a dtype or the name of one; returns None for anything else.

    Args:
        value: A dtype, its name in torch with or without ``torch.`` (``"bfloat16"``, ``"half"``),
            or one of ``SHORT_NAMES``.
    """
    dtype = value
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        dtype = SHORT_NAMES.get(name) or getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def is_low(dtype: torch.dtype) -> bool:
    """Returns True for the dtypes of autocast, ``torch.bfloat16`` and ``torch.float16``."""
    return dtype.is_floating_point and dtype.itemsize == 2


def is_dtensor(value: object) -> bool:
    """Returns True if a value is a DTensor."""
    # Importing the module takes a second, and there are no DTensors before it is imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(value) is module.DTensor
