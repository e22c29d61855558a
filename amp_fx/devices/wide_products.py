"""Selects products that run in float32 on this CPU: those whose dtype it has no units for.

No timing decides: the bits of a result must not depend on how busy a machine was. A wide product
differs in its sums, never in where values are rounded.
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
    **dict.fromkeys(("bmm", "baddbmm"), (BATCHED,)),
    **dict.fromkeys(("matmul", "einsum"), (PRODUCT, BATCHED)),
    "conv": (CONVOLUTION, CONVOLUTION_BACKWARD),
    "scaled_dot_product_attention": (ATTENTION, ATTENTION_BACKWARD),
}
"""The kinds of kernels that come of ops of a program."""


def is_wide(kind: str, dtype: torch.dtype, least_size: int) -> bool:
    """Returns True if a product in a low dtype is to be a sum of float32.

    torch's own kernels of attention take bfloat16 on every CPU. Their backward is slower than in
    float32 for few positions with units for bfloat16, and for many without: measured on AMD EPYC,
    and with oneDNN held to ``AVX2``, torch 2.13.

    Args:
        kind: ``PRODUCT`` or another kind of kernel.
        dtype: The low dtype.
        least_size: The least of its sizes.
    """
    has_units = has_product_kernels(dtype)
    if has_units is None:
        return False
    if dtype is torch.bfloat16 and kind == ATTENTION_BACKWARD:
        return least_size < 128 if has_units else least_size >= 64
    is_own = dtype is torch.bfloat16 and kind == ATTENTION
    return not has_units and not is_own


def units() -> tuple[bool | None, ...]:
    """Returns what ``is_wide`` depends on besides its arguments."""
    return tuple(map(has_product_kernels, (torch.bfloat16, torch.float16)))


def described(dtype: torch.dtype, ops: Iterable[str]) -> str:
    """Returns a sentence on the products of some ops that are wide here; ``""`` if none are."""
    called = dict.fromkeys(kind for op in ops for kind in _KINDS_OF.get(op.rstrip("123d"), ()))
    kinds = [kind for kind in called if any(is_wide(kind, dtype, size) for size in (1, 1024))]
    if not kinds:
        return ""
    return (
        f"inductor's products in {dtype_name(dtype)} are sums of float32 on this CPU, rounded once "
        f"({', '.join(kinds)}): bits differ from native's, unless numerics='eager'"
    )
