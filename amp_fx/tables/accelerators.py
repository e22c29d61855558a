"""XPU, MTIA and MAIA: the reference lists and the ban, nothing of their own.

Source: ``TORCH_LIBRARY_IMPL(aten, AutocastXPU, m)`` and its two siblings in
``ATen/autocast_mode.cpp``.
"""

from __future__ import annotations

from amp_fx.tables import families
from amp_fx.tables.build import build_table
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.reference import ROWS

XPU = build_table((*ROWS, (CastPolicy.BANNED, families.UNSAFE)))
MTIA = XPU
MAIA = XPU
