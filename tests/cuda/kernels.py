"""Kernels in Triton that the tests of its interpreter run."""

from __future__ import annotations

import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice  # type: ignore[attr-defined]

SIZE = tl.constexpr(64)


@triton.jit
def cast(source, target):  # type: ignore[no-untyped-def]
    """Stores numbers in the dtype of the target."""
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def welford(source, mean, squares):  # type: ignore[no-untyped-def]
    """The mean, and the sum of squared distances from it, in one reduction."""
    at = tl.arange(0, SIZE)
    x = tl.load(source + at)[None, :]
    found, m2, _ = triton_helpers.welford(x, tl.zeros_like(x), tl.full(x.shape, 1, tl.float32), 1)
    one = tl.arange(0, 1)
    tl.store(mean + one, found)
    tl.store(squares + one, m2)


@triton.jit
def largest(source, value, index):  # type: ignore[no-untyped-def]
    """The largest number and where it is."""
    at = tl.arange(0, SIZE)
    x = tl.load(source + at)[None, :]
    places = tl.broadcast_to(at[None, :], x.shape)
    found, place = triton_helpers.max_with_index(x, places, 1)
    one = tl.arange(0, 1)
    tl.store(value + one, found)
    tl.store(index + one, place)


@triton.jit
def _log_add(left, right):  # type: ignore[no-untyped-def]
    high = tl.maximum(left, right)
    return high + tl.log(tl.exp(left - high) + tl.exp(right - high))


@triton.jit
def log_sums(source, target):  # type: ignore[no-untyped-def]
    """``torch.logcumsumexp``: a scan by a function of its own."""
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.associative_scan(tl.load(source + at), 0, _log_add))


@triton.jit
def tanh(source, target):  # type: ignore[no-untyped-def]
    """A function of libdevice."""
    at = tl.arange(0, SIZE)
    tl.store(target + at, libdevice.tanh(tl.load(source + at)))


@triton.jit
def double(source, target):  # type: ignore[no-untyped-def]
    """Reads one tensor and writes another."""
    at = tl.arange(0, SIZE)
    tl.store(target + at, 2 * tl.load(source + at))
