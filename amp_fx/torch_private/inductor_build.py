"""The compiler of C++ that inductor uses."""

from __future__ import annotations

import torch
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions, get_cpp_compiler, is_gcc
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import cache_dir

__all__ = (
    "CppBuilder",
    "CppTorchOptions",
    "InvalidCxxCompiler",
    "cache_dir",
    "get_cpp_compiler",
    "is_gcc",
)

GLIBCXX_USE_CXX11_ABI = torch._C._GLIBCXX_USE_CXX11_ABI
