"""Marks that skip tests where a requirement is missing."""

from __future__ import annotations

import pytest
import torch

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.weights.watch import engine, is_available

WATCH = pytest.mark.skipif(engine() is None, reason="the part that watches weights is not built")
HOOK = pytest.mark.skipif(not is_available(), reason="needs torch's hook on storages, new in 2.13")
CPP_COMPILER = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")
FROZEN_GRAPHS = pytest.mark.skipif(
    not has_cpp_compiler() or not is_available(),
    reason="frozen graphs need a C++ compiler and torch's hook on storages, new in 2.13",
)
PACKING = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="oneDNN packs bfloat16 weights where the processor has AVX-512",
)
