"""Cast policies of ops as data.

``measured/`` contains one file per torch version, which ``tests.tables.measure`` writes.
``reasons.py`` contains the reasons of the policies, and ``presets.py`` creates the tables of
presets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")
"""Device types whose autocast is part of PyTorch."""

OWN_KERNELS: Mapping[str, tuple[str, ...]] = {"cuda": ("aten::_cudnn_rnn",)}
"""Ops with an autocast kernel that no cast policy describes. They are in no table.

CUDA builds register a kernel for ``_cudnn_rnn`` that casts to float16 for any autocast dtype, and
copies the weights into one flat buffer (``ATen/cudnn/AutocastRNN.cpp``).
"""
