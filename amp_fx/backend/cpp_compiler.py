"""Finds the C++ compiler that inductor needs for CPU kernels."""

from __future__ import annotations

import functools


@functools.cache
def has_cpp_compiler() -> bool:
    """Returns True if inductor finds the C++ compiler that it needs for CPU kernels.

    Relies on ``torch._inductor.cpp_builder.get_cpp_compiler`` raising if there is none.
    """
    from amp_fx.torch_private.inductor_build import InvalidCxxCompiler, get_cpp_compiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError, OSError):
        return False
    return True
