"""Tests devices for units for float8, and explains what is missing."""

from __future__ import annotations

import functools
import warnings

import torch

from amp_fx.devices.low_dtypes import device_names
from amp_fx.errors import DtypeWarning
from amp_fx.torch_private.ops import has_kernel_for

LEAST_CAPABILITY = (8, 9)
"""The first compute capability with float8 units."""

EXPERTS_CAPABILITY = (9, 0)
"""The compute capability of ``torch._scaled_grouped_mm``."""


def why_no_float8(device: torch.device) -> str:
    """Returns why products on a device do not run in float8; an empty string if they do.

    A CUDA device that is not here is taken for one that has the units.
    """
    if device.type in ("cpu", "meta"):
        return ""
    if device.type != "cuda":
        return f"float8 products are for CUDA, not for {device.type}"
    if torch.version.hip is not None:
        return "float8 products were not tried on ROCm"
    if not torch.cuda.is_available():
        return ""
    return _why_not_on_cuda(device.index or 0)


def why_no_float8_experts(device: torch.device) -> str:
    """Returns why products with a weight per expert do not; for devices that ``why_no_float8`` has.

    Source: torch's ``_scaled_grouped_mm_cuda``, whose kernel for scales by row is Hopper's.
    """
    if device.type == "meta":
        return ""
    key = device.type.upper()
    if not has_kernel_for("aten::_scaled_grouped_mm", key):
        return f"torch has no torch._scaled_grouped_mm for {device.type}"
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    index = device.index or 0
    if torch.cuda.get_device_capability(index) == EXPERTS_CAPABILITY:
        return ""
    return f"torch._scaled_grouped_mm is for 9.0, and here is {device_names('cuda', [index])}"


@functools.cache
def _why_not_on_cuda(index: int) -> str:
    if torch.cuda.get_device_capability(index) >= LEAST_CAPABILITY:
        return ""
    return f"{device_names('cuda', [index])} has no float8 units, which begin with 8.9"


@functools.cache
def warn_of_slowness() -> None:
    """Warns once that processors have no units for float8."""
    warnings.warn(
        "float8 products on the CPU give the numbers of a GPU's recipe, but are slower than "
        "bfloat16: processors have no float8 units",
        DtypeWarning,
        stacklevel=2,
    )
