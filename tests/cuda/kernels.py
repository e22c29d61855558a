"""A kernel in Triton that the tests of its interpreter run."""

from __future__ import annotations

import triton
import triton.language as tl

SIZE = tl.constexpr(64)


@triton.jit
def cast(source, target):  # type: ignore[no-untyped-def]
    """Stores numbers in the dtype of the target."""
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))
