"""Cast policies of ops, as data: ``measured/`` has a file per torch version.

``measure.py`` writes these files, ``reasons.py`` says why ops have their policies, and
``presets.py`` makes the tables of each preset from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")
"""Device types whose autocast PyTorch registers itself."""

OWN_KERNELS: Mapping[str, tuple[str, ...]] = {"cuda": ("aten::_cudnn_rnn",)}
"""Ops with an autocast kernel that no cast policy describes: no table lists them.

CUDA builds register ``_cudnn_rnn``. Its kernel casts to float16 whatever the autocast dtype, and
copies the weights into one flat buffer (``ATen/cudnn/AutocastRNN.cpp``).
"""
