"""Selects low-precision products that run in float32 because this CPU has no hardware for them.

The selection is not based on timing, because the bits of a result must not depend on the load of a
machine. Such a product only differs in the order of its sums; inputs and results are rounded to the
low dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amp_fx.devices.low_dtypes import has_product_kernels
from amp_fx.dtypes import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable

PRODUCT, BATCHED = "product", "batched"
CONVOLUTION, CONVOLUTION_BACKWARD = "convolution", "convolution backward"
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"

_KINDS_OF = {
    **dict.fromkeys(("linear", "mm", "addmm"), (PRODUCT,)),
    **dict.fromkeys(("addbmm", "baddbmm", "bmm"), (BATCHED,)),
    **dict.fromkeys(("matmul", "einsum"), (PRODUCT, BATCHED)),
    "conv": (CONVOLUTION, CONVOLUTION_BACKWARD),
    "scaled_dot_product_attention": (ATTENTION, ATTENTION_BACKWARD),
}
"""Kinds of kernels that the ops of a program use."""


def is_wide(kind: str, dtype: torch.dtype, least_size: int) -> bool:
    """Returns True if a low-precision product runs in float32.

    torch's attention kernels support bfloat16 on every CPU. Their backward is slower than in
    float32 for short sequences on CPUs with bfloat16 hardware, and for long sequences on others
    (measured with torch 2.13 on AMD EPYC, also with oneDNN restricted to ``AVX2``).

    Args:
        kind: ``PRODUCT`` or another kind of kernel.
        dtype: The low dtype.
        least_size: The smallest of its sizes.
    """
    has_units = has_product_kernels(dtype)
    if has_units is None:
        return False
    if dtype is torch.bfloat16 and kind == ATTENTION_BACKWARD:
        return least_size < 128 if has_units else least_size >= 64
    is_supported = dtype is torch.bfloat16 and kind == ATTENTION
    return not has_units and not is_supported


def units() -> tuple[bool | None, ...]:
    """Returns the properties of the CPU on which ``is_wide`` depends."""
    return tuple(map(has_product_kernels, (torch.bfloat16, torch.float16)))


def described(dtype: torch.dtype, ops: Iterable[str]) -> str:
    """Returns a sentence on the products of ops that run in float32; ``""`` if there are none."""
    used = dict.fromkeys(kind for op in ops for kind in _KINDS_OF.get(op.rstrip("123d"), ()))
    kinds = [kind for kind in used if any(is_wide(kind, dtype, size) for size in (1, 1024))]
    if not kinds:
        return ""
    return (
        f"inductor's {dtype_name(dtype)} products are computed in float32 on this CPU and rounded "
        f"once ({', '.join(kinds)}): bits differ from native autocast unless numerics='eager'"
    )
