"""Identifies units for low dtypes, and warns about devices without bfloat16 support."""

from __future__ import annotations

import functools
import platform
import warnings
from typing import TYPE_CHECKING

import torch

from amp_fx.errors import DtypeWarning

if TYPE_CHECKING:
    from collections.abc import Iterable


def bfloat16_units() -> list[str]:
    """Returns the CPU's instruction sets for bfloat16 products, as far as torch detects them.

    Relies on ``torch.cpu._is_avx512_bf16_supported`` and ``_is_amx_tile_supported``.
    """
    functions = {"avx512_bf16": "_is_avx512_bf16_supported", "amx": "_is_amx_tile_supported"}
    return [name for name, function in functions.items() if getattr(torch.cpu, function, bool)()]


@functools.cache
def has_product_kernels(dtype: torch.dtype) -> bool | None:
    """Returns True if oneDNN has fast kernels for products in a low dtype on this CPU.

    Returns None on processors other than x86, which were not measured. AVX512 kernels that emulate
    bfloat16 count as fast. ``ONEDNN_MAX_CPU_ISA`` restricts oneDNN to older instructions. Relies on
    ``torch.ops.mkldnn._is_mkldnn_bf16_supported`` and ``_is_mkldnn_fp16_supported``.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return None if is_supported is None else bool(is_supported())


DIFFERING = ("cuda", "xpu")
"""Device types with and without bfloat16 support, depending on the device."""


def without_bfloat16(device_type: str, indices: Iterable[int] = ()) -> tuple[int, ...]:
    """Returns the devices without bfloat16 support; empty if the device type is unavailable."""
    if device_type not in DIFFERING or not _is_available(device_type):
        return ()
    checked = sorted(indices) or range(torch.get_device_module(device_type).device_count())
    return tuple(index for index in checked if not _has_bfloat16(device_type, index))


@functools.cache
def _is_available(device_type: str) -> bool:
    return bool(torch.get_device_module(device_type).is_available())


@functools.cache
def _has_bfloat16(device_type: str, index: int) -> bool:
    """Returns the result of ``is_bf16_supported(including_emulation=False)`` for any device.

    CUDA supports bfloat16 from compute capability 8.0 on. Like torch, assumes that all ROCm devices
    support it.
    """
    if device_type == "xpu":
        properties = torch.xpu.get_device_properties(index)
        return bool(getattr(properties, "has_bfloat16_conversions", True))
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= (8, 0)


@functools.cache
def warn_of_default(device_type: str, lacking: tuple[int, ...]) -> None:
    """Warns once that float16 is the default dtype of a device type."""
    reason = "it is autocast's default"
    if lacking:
        reason = f"{device_names(device_type, lacking)} has no bfloat16 units"
    warnings.warn(
        f"low-precision ops on {device_type!r} run in float16: no dtype was passed, and {reason}. "
        "Small gradients underflow in float16, so train with amp_fx.GradScaler. Pass "
        "dtype=torch.float16 to silence this warning",
        DtypeWarning,
        stacklevel=2,
    )


@functools.cache
def warn_of_emulation(device_type: str, lacking: tuple[int, ...]) -> None:
    """Warns once that a bfloat16 region uses devices without bfloat16 support.

    For such devices, inductor does not compile graphs with bfloat16 inputs or outputs, and Dynamo
    runs them uncompiled (``torch._inductor.compile_fx._check_triton_bf16_support``).
    """
    warnings.warn(
        f"{device_names(device_type, lacking)} has no bfloat16 units: products are emulated, "
        "slower than in float32, and graphs may run uncompiled. Use torch.float16 instead, with "
        "amp_fx.GradScaler in training",
        DtypeWarning,
        stacklevel=2,
    )


def forget_devices() -> None:
    """Clears cached capabilities of devices, and repeats warnings."""
    for function in (_is_available, _has_bfloat16, warn_of_default, warn_of_emulation):
        function.cache_clear()


def device_names(device_type: str, indices: Iterable[int]) -> str:
    """Returns names of devices, such as ``Tesla T4 (compute capability 7.5)``."""
    return ", ".join(dict.fromkeys(_device_name(device_type, index) for index in indices))


def _device_name(device_type: str, index: int) -> str:
    name = str(torch.get_device_module(device_type).get_device_name(index))
    if device_type != "cuda":
        return name
    major, minor = torch.cuda.get_device_capability(index)
    return f"{name} (compute capability {major}.{minor})"
