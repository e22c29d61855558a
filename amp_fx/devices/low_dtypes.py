"""Identifies the processor, and warns of devices without units for bfloat16."""

from __future__ import annotations

import functools
import platform
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amp_fx.errors import DtypeWarning

if TYPE_CHECKING:
    from collections.abc import Iterable


@functools.cache
def processor_name() -> str:
    """The processor's name, as Linux or the platform tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def bfloat16_units() -> list[str]:
    """Returns the CPU's units for products in bfloat16, where torch can tell.

    Relies on ``torch.cpu._is_avx512_bf16_supported`` and ``_is_amx_tile_supported``.
    """
    asked = {"avx512_bf16": "_is_avx512_bf16_supported", "amx": "_is_amx_tile_supported"}
    return [name for name, function in asked.items() if getattr(torch.cpu, function, bool)()]


@functools.cache
def has_product_kernels(dtype: torch.dtype) -> bool | None:
    """Returns True if oneDNN has fast kernels for products in a low dtype on this CPU.

    None on processors other than x86, of which nothing was measured. oneDNN counts the kernels for
    AVX512 that emulate bfloat16; ``ONEDNN_MAX_CPU_ISA`` holds it to older instructions. Relies on
    ``torch.ops.mkldnn._is_mkldnn_bf16_supported`` and ``_is_mkldnn_fp16_supported``.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return None if asked is None else bool(asked())


DIFFERING = ("cuda", "xpu")
"""Device types of which some have bfloat16 units and some do not."""


def without_bfloat16(device_type: str, indices: Iterable[int] = ()) -> tuple[int, ...]:
    """Returns the devices without units for bfloat16; none if nobody can be asked."""
    if device_type not in DIFFERING or not _is_here(device_type):
        return ()
    found = sorted(indices) or range(torch.get_device_module(device_type).device_count())
    return tuple(index for index in found if not _has_bfloat16(device_type, index))


@functools.cache
def _is_here(device_type: str) -> bool:
    return bool(torch.get_device_module(device_type).is_available())


@functools.cache
def _has_bfloat16(device_type: str, index: int) -> bool:
    """Works like ``is_bf16_supported(including_emulation=False)``, which asks the current device.

    CUDA has the units from compute capability 8.0 on; ROCm everywhere, as torch takes it.
    """
    if device_type == "xpu":
        properties = torch.xpu.get_device_properties(index)
        return bool(getattr(properties, "has_bfloat16_conversions", True))
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= (8, 0)


@functools.cache
def warn_of_default(device_type: str, lacking: tuple[int, ...]) -> None:
    """Warns once that float16 is a default here, and what it needs in training."""
    why = "that is autocast's default"
    if lacking:
        why = f"{device_names(device_type, lacking)} has no bfloat16 units"
    warnings.warn(
        f"low-precision ops on {device_type!r} run in float16: no dtype was given, and {why}. "
        "Small gradients vanish in float16: train with amp_fx.GradScaler, and pass the dtype if "
        "you want float16",
        DtypeWarning,
        stacklevel=2,
    )


@functools.cache
def warn_of_emulation(device_type: str, lacking: tuple[int, ...]) -> None:
    """Warns once that a bfloat16 region is on devices without the units.

    Of a graph with bfloat16 inputs or outputs inductor makes no kernels for them: Dynamo runs it
    uncompiled (``torch._inductor.compile_fx._check_triton_bf16_support``).
    """
    warnings.warn(
        f"{device_names(device_type, lacking)} has no bfloat16 units: products are emulated, "
        "slower than in float32, and graphs may run uncompiled. torch.float16, with "
        "amp_fx.GradScaler in training, is fast",
        DtypeWarning,
        stacklevel=2,
    )


def forget_devices() -> None:
    """Forgets the answers of devices, and gives warnings again."""
    for function in (_is_here, _has_bfloat16, warn_of_default, warn_of_emulation):
        function.cache_clear()


def device_names(device_type: str, indices: Iterable[int]) -> str:
    """``Tesla T4 (compute capability 7.5)``."""
    return ", ".join(dict.fromkeys(_device_name(device_type, index) for index in indices))


def _device_name(device_type: str, index: int) -> str:
    name = str(torch.get_device_module(device_type).get_device_name(index))
    if device_type != "cuda":
        return name
    major, minor = torch.cuda.get_device_capability(index)
    return f"{name} (compute capability {major}.{minor})"
