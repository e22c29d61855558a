"""Reads and writes names of dtypes, and recognises low-precision dtypes and DTensors."""

from __future__ import annotations

import sys

import torch

from amp_fx.errors import OptionError

LOW_DTYPE_NAMES = ("bfloat16", "float16")
SHORT_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What people write, and torch has no such attribute for; ``half`` it has."""


def dtype_name(dtype: torch.dtype | None) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def as_dtype(value: object) -> torch.dtype | None:
    """The dtype that somebody means; None if it is none.

    Args:
        value: A dtype, torch's name for one, with or without ``torch.`` (``"bfloat16"``,
            ``"half"``), or one of ``SHORT_NAMES``.
    """
    found = value
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        found = SHORT_NAMES.get(name) or getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def low_dtype_named(text: str) -> torch.dtype:
    """The low dtype that ``--dtype`` of a command line names."""
    found = as_dtype(text)
    if found is None or not is_low(found):
        raise OptionError(f"--dtype {text}: not one of {', '.join(LOW_DTYPE_NAMES)}")
    return found


def is_low(dtype: torch.dtype) -> bool:
    """Returns True if it is a dtype to autocast to: ``torch.bfloat16`` or ``torch.float16``."""
    return dtype.is_floating_point and dtype.itemsize == 2


def is_spread(value: object) -> bool:
    """Returns True if something is a DTensor; without importing what takes a second to import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(value) is module.DTensor
