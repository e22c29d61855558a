"""The Triton kernel that compares an element of each of many copies with its weight's.

Only where triton is installed: CUDA and XPU builds of torch bring it along.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

_BLOCK = 128
"""How many copies one program compares."""


def launch(
    table: torch.Tensor,
    flags: torch.Tensor,
    seed: int,
    source_dtype: torch.dtype,
    low_dtype: torch.dtype,
) -> None:
    """Sets the flag of each copy that differs at a place of its own, on the current stream.

    Args:
        table: int64, by row: addresses of weights, addresses of copies, their numbers of
            elements (at least one, less than 2 ** 31).
        flags: int32, one for each copy; those that are set stay so.
        seed: What the places follow from; less than 2 ** 31.
        source_dtype: Dtype of all weights.
        low_dtype: Dtype of all copies.
    """
    count = flags.numel()
    types = TYPES[source_dtype], TYPES[low_dtype]
    compare[(triton.cdiv(count, _BLOCK),)](table, flags, count, seed, *types, _BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def load(addresses, position, mask, kind: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: D103
    if kind == tl.bfloat16:  # by its bits: not every device, nor Triton's interpreter, knows it
        bits = tl.load(addresses.to(tl.pointer_type(tl.uint16)) + position, mask, 0)
        value = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        value = tl.load(addresses.to(tl.pointer_type(kind)) + position, mask, 0.0).to(tl.float32)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def rounded(value, kind: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: D103
    if kind == tl.bfloat16:  # to the nearest, ties to even
        bits = value.to(tl.uint32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        value = tl.where(value != value, value, bits.to(tl.float32, bitcast=True))
    else:
        value = value.to(kind).to(tl.float32)
    return value


# Neither count nor seed is worth a kernel of its own where it is 1 or divisible by 16.
@triton.jit(do_not_specialize=["count", "seed"])  # type: ignore[untyped-decorator]
def compare(  # type: ignore[no-untyped-def] # noqa: D103
    table,
    flags,
    count,
    seed,
    source_type: tl.constexpr,
    low_type: tl.constexpr,
    block: tl.constexpr,
):
    index = tl.program_id(0) * block + tl.arange(0, block)
    is_copy = index < count
    sources = tl.load(table + index, is_copy, 0)
    lows = tl.load(table + count + index, is_copy, 0)
    numels = tl.load(table + 2 * count + index, is_copy, 0)
    random = tl.randint(seed, index).to(tl.uint32, bitcast=True).to(tl.int64)
    position = (random * numels) >> 32
    # By way of float32, as torch casts: from float64 it rounds twice.
    wanted = rounded(load(sources, position, is_copy, source_type), low_type)
    kept = load(lows, position, is_copy, low_type)
    are_nan = (wanted != wanted) & (kept != kept)
    tl.store(flags + index, 1, is_copy & (wanted != kept) & ~are_nan)
