"""Which processor this is, and which low dtypes it has units for."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch


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
    """Which units for products in bfloat16 the CPU has, where torch can tell.

    Relies on ``torch.cpu._is_avx512_bf16_supported`` and ``_is_amx_tile_supported``.
    """
    asked = {"avx512_bf16": "_is_avx512_bf16_supported", "amx": "_is_amx_tile_supported"}
    return [name for name, function in asked.items() if getattr(torch.cpu, function, bool)()]


@functools.cache
def has_product_kernels(dtype: torch.dtype) -> bool | None:
    """Whether oneDNN has more than a reference kernel for products in a low dtype on this CPU.

    None on processors other than x86, of which nothing was measured. oneDNN counts the kernels for
    AVX512 that emulate bfloat16; ``ONEDNN_MAX_CPU_ISA`` holds it to older instructions. Relies on
    ``torch.ops.mkldnn._is_mkldnn_bf16_supported`` and ``_is_mkldnn_fp16_supported``.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return None if asked is None else bool(asked())
