"""Lists what autocast does to each op, as data: read ``families.py`` first, then a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_fx.tables.cpu import CPU
from amp_fx.tables.cuda import CUDA, CUDA_OWN_KERNELS
from amp_fx.tables.mps import MPS
from amp_fx.tables.reference import MAIA, MTIA, XPU

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amp_fx.tables.build import Table

DEVICES: Mapping[str, Table] = {
    "cpu": CPU,
    "cuda": CUDA,
    "xpu": XPU,
    "mps": MPS,
    "mtia": MTIA,
    "maia": MAIA,
}
"""The table of each device type, with the rows of every torch version."""

OWN_KERNELS: Mapping[str, tuple[str, ...]] = {"cuda": CUDA_OWN_KERNELS}
"""Ops with an autocast kernel that no cast policy describes: no table lists them."""
