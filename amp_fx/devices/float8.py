"""Checks devices for hardware support of float8."""

from __future__ import annotations

import functools
import warnings

import torch

from amp_fx.devices.low_dtypes import device_names
from amp_fx.errors import DtypeWarning

LEAST_CAPABILITY = (8, 9)
"""Lowest compute capability with float8 support."""


def why_no_float8(device: torch.device) -> str:
    """Returns the reason why a device cannot compute float8 products; empty if it can.

    Assumes that CUDA devices that this machine lacks can.
    """
    if device.type in ("cpu", "meta"):
        return ""
    if device.type != "cuda":
        return f"float8 products are not supported on {device.type}"
    if torch.version.hip is not None:
        return "float8 products were not tested on ROCm"
    if not torch.cuda.is_available():
        return ""
    return _why_not_on_cuda(device.index or 0)


@functools.cache
def _why_not_on_cuda(index: int) -> str:
    if torch.cuda.get_device_capability(index) >= LEAST_CAPABILITY:
        return ""
    return f"{device_names('cuda', [index])} has no float8 support, which requires 8.9 or higher"


@functools.cache
def warn_of_slowness() -> None:
    """Warns once that CPUs have no hardware support for float8."""
    warnings.warn(
        "float8 products on the CPU return the same numbers as on a GPU, but are slower than "
        "bfloat16 because CPUs have no float8 hardware: use them for tests only",
        DtypeWarning,
        stacklevel=2,
    )
