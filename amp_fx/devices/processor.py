"""Which processor this is, and which low dtypes it has units for."""

from __future__ import annotations

import functools
import os
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


def kernels_in_use() -> tuple[str | None, ...]:
    """Returns a key of the kernels of ATen and oneDNN that run here: equal if the same ones do.

    ``ONEDNN_MAX_CPU_ISA`` (and the name that it had before) holds oneDNN to older instructions.
    """
    held = [os.environ.get(name) for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")]
    capability = torch.backends.cpu.get_cpu_capability()
    return (processor_name(), capability, *bfloat16_units(), *held)
