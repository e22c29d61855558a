"""Inductor's C++ compiler."""

from __future__ import annotations

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
