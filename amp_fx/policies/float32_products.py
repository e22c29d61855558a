"""Computes one product with a float32 result of low-precision factors, forward and backward.

Routers of mixtures of experts and output heads need it: nothing is rounded after the product. CUDA
and XPU have kernels for it (``out_dtype`` of ``torch.mm``). A factor is one low-precision tensor
(``lower_precision_wide``), or the sum of several (``bfloat16x3``):

    x = 2 * (t0 + 2**-8 * t1 + 2**-17 * t2)        # exact for every finite float32 number

The products of the terms ``i`` and ``j`` with ``i + j <= 2`` are computed; the other three are
below the rounding of float32. The scales make the sum exact for subnormal numbers too, and no
product of terms is larger than the product of the factors, so that nothing overflows on the way.

A CPU has no such kernels. There it is one float32 product, of rounded factors or of the factors
themselves, which are what the terms add up to.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import is_spread
from amp_fx.policies.calls import bind, is_eligible, qualified_name
from amp_fx.policies.rounding import round_to, rounded
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.float8 import PRODUCTS
from amp_fx.torch_private.autocast import DisableAutocast
from amp_fx.torch_private.autograd import (
    apply_in_op,
    are_transforms_active,
    below_transform,
    skip_frames_of,
)
from amp_fx.torch_private.modes import DisableTorchFunction

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.policies.calls import Call

FLOAT32_PRODUCT = "amp_fx::float32_product"
"""The qualified name of the op that is in graphs."""

FLOAT32_POLICIES = (CastPolicy.LOWER_PRECISION_WIDE, CastPolicy.BFLOAT16X3)
"""Policies of products that give float32."""

WITH_OUT_DTYPE = ("cuda", "xpu")

_MAX_TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""The number of bfloat16 terms that add up to a number of a dtype."""

_SCALES = (1.0, 2.0**-8, 2.0**-17)
_SMALLEST = 2.0**-133
"""The smallest positive number of bfloat16."""

_library = torch.library.Library("amp_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "float32_product(Tensor self, Tensor mat2, ScalarType? low_dtype) -> Tensor"
)


@torch.library.impl(_library, "float32_product", "CompositeImplicitAutograd")
def _float32_product(
    a: torch.Tensor, b: torch.Tensor, low_dtype: torch.dtype | None
) -> torch.Tensor:
    """Multiplies ``[n, k]`` and ``[k, m]``, or batches of them, in low-precision units.

    Args:
        a: ``[n, k]`` or ``[batch, n, k]``, floating point.
        b: ``[k, m]`` or ``[batch, k, m]``.
        low_dtype: The dtype that factors are rounded to; None splits them into bfloat16 terms.

    Returns:
        float32, ``[n, m]`` or ``[batch, n, m]``.
    """
    product: torch.Tensor = apply_in_op(_Float32Product, a, b, low_dtype)
    return product


class _Float32Product(torch.autograd.Function):
    """Treats the factors of the products of the backward alike, and rounds no result."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, low_dtype: torch.dtype | None) -> torch.Tensor:
        if are_transforms_active():  # those around this one differentiate the op, too
            op: Callable[..., torch.Tensor] = torch.ops.amp_fx.float32_product
            return below_transform(op, a, b, low_dtype)
        return _product(a, b, low_dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: torch.Tensor) -> None:
        a, b, ctx.low_dtype = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = torch.ops.amp_fx.float32_product(grads[0], b.mT, ctx.low_dtype).to(a.dtype)
        if ctx.needs_input_grad[1]:
            grad_b = torch.ops.amp_fx.float32_product(a.mT, grads[0], ctx.low_dtype).to(b.dtype)
        return grad_a, grad_b, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        a, b = ctx.saved_tensors
        products = [
            torch.ops.amp_fx.float32_product(*factors, ctx.low_dtype)
            for factors in ((tangents[0], b), (a, tangents[1]))
            if all(factor is not None for factor in factors)
        ]
        return below_transform(sum, products)


def _product(a: torch.Tensor, b: torch.Tensor, low_dtype: torch.dtype | None) -> torch.Tensor:
    product = torch.mm if a.dim() == 2 else torch.bmm
    with DisableTorchFunction(), DisableAutocast():  # a backward may be called in a region
        if a.device.type not in WITH_OUT_DTYPE or is_spread(a) or is_spread(b):
            return product(_in_float32(a, low_dtype), _in_float32(b, low_dtype))
        low_product = functools.partial(product, out_dtype=torch.float32)
        if low_dtype is None:
            return product_of_terms(a, b, low_product)
        return low_product(a.to(low_dtype), b.to(low_dtype))


def product_of_terms(
    a: torch.Tensor, b: torch.Tensor, product: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Multiplies two factors by products of their bfloat16 terms.

    Those of one term of ``b`` are one product, with the terms of ``a`` below each other: ``b`` is
    the weight, and each of its terms is read once.

    Args:
        a: ``[n, k]`` or ``[batch, n, k]``.
        b: ``[k, m]`` or ``[batch, k, m]``.
        product: Multiplies two bfloat16 tensors; gives float32.
    """
    left, right = terms(a), terms(b)
    stacked = left[0] if len(left) == 1 else torch.cat(left, -2)
    num_rows = a.shape[-2]
    parts: list[tuple[int, torch.Tensor]] = []
    for j, term in enumerate(right):
        num_terms = min(len(left), len(_SCALES) - j)
        found = product(stacked.narrow(-2, 0, num_terms * num_rows), term)
        for i in range(num_terms):
            part = found.narrow(-2, i * num_rows, num_rows)
            parts.append((i + j, part * (_SCALES[i] * _SCALES[j])))
    (_, largest), *rest = sorted(parts, key=lambda part: part[0])
    if not rest:
        return largest
    small = functools.reduce(torch.add, [part for _, part in reversed(rest)])
    # Other terms of infinite numbers are NaN.
    total = torch.where(largest.isinf(), largest, largest + small)
    return total * 2.0 ** sum(len(each) > 1 for each in (left, right))


def terms(x: torch.Tensor) -> list[torch.Tensor]:
    """Splits a matrix, or a batch of them, into bfloat16 tensors.

    Returns:
        ``[x]`` if it is bfloat16 itself; else terms, whose sum with the factors ``_SCALES`` is
        exactly half of it.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    num_terms = _MAX_TERMS[x.dtype]
    if num_terms == 1:
        return [x]
    is_row, is_column = (statically_known_true(x.stride(dim) == 1) for dim in (-1, -2))
    if is_column and not is_row:  # so that the backward has the terms of the weight itself, too
        return [term.mT for term in terms(x.mT)]
    x = x.to(torch.float32)
    first = round_to(x * 0.5, torch.bfloat16)
    # Not zero where x is not: infinity times zero is NaN.
    first = torch.where(first == 0, x.sign() * _SMALLEST, first)
    left = (x - first - first) * 2.0**7
    second = round_to(left, torch.bfloat16)
    found = first, second, (left - second) * 2.0**9
    return [term.to(torch.bfloat16) for term in found[:num_terms]]


def _in_float32(tensor: torch.Tensor, low_dtype: torch.dtype | None) -> torch.Tensor:
    """Returns a tensor in float32, rounded to a low dtype if there is one."""
    if low_dtype is None:
        return tensor.to(torch.float32)
    if tensor.dtype == low_dtype:
        return tensor.to(torch.float32)
    return round_to(tensor.to(torch.float32), low_dtype)


_KERNELS = (
    *(_float32_product, _product, product_of_terms, terms, _in_float32),
    *(is_spread, round_to, rounded, apply_in_op, below_transform),
)


def can_give_float32(call: Call, device_type: str) -> bool:
    """Returns True if autocast may cast both factors of a call, and both are dense.

    Args:
        call: A call of an op of ``tables.products.FLOAT32_PRODUCTS``.
        device_type: The device type of the region.
    """
    operands, bound = PRODUCTS[qualified_name(call[0])], bind(*call)
    factors = [bound[operands.input], bound[operands.weight]]
    return all(
        is_eligible(factor, device_type) and factor.layout is torch.strided and not factor.is_nested
        for factor in factors
    )


def run_with_float32_result(call: Call, policy: CastPolicy, low_dtype: torch.dtype) -> torch.Tensor:
    """Computes a call of an op of ``tables.products.FLOAT32_PRODUCTS`` with a float32 result.

    What is added, a bias, is taken as it is: it is no input of the product.

    Args:
        call: The call.
        policy: ``LOWER_PRECISION_WIDE`` or ``BFLOAT16X3``.
        low_dtype: The low dtype of the region.
    """
    skip_frames_of(_Float32Product, *_KERNELS)
    operands, bound = PRODUCTS[qualified_name(call[0])], bind(*call)
    a, b, added = bound[operands.input], bound[operands.weight], bound.get(operands.bias)
    b = b.mT if operands.has_rows_of_outputs and b.dim() > 1 else b
    is_split = policy is CastPolicy.BFLOAT16X3
    product: torch.Tensor = _any_dims(a, b, None if is_split else low_dtype)
    if added is None:
        return product
    alpha, beta = bound.get("alpha", 1), bound.get("beta", 1)
    product = product if alpha == 1 else product * alpha
    if beta != 0:  # else torch ignores what is added, also where it is not finite
        added = added.to(torch.float32)
        product = product + (added if beta == 1 else added * beta)
    return product


def _any_dims(a: torch.Tensor, b: torch.Tensor, low_dtype: torch.dtype | None) -> Any:
    """Multiplies as ``torch.matmul``: vectors, matrices, and batches that broadcast."""
    is_row, is_column = a.dim() == 1, b.dim() == 1
    a = a.unsqueeze(0) if is_row else a
    b = b.unsqueeze(1) if is_column else b
    if b.dim() == 2:  # one product for all batches of ``a``
        rows = a.flatten(0, -2) if a.dim() > 2 else a
        product = torch.ops.amp_fx.float32_product(rows, b, low_dtype)
        product = product.reshape(*a.shape[:-1], b.shape[-1]) if a.dim() > 2 else product
    else:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
        left = a.expand(*batch, *a.shape[-2:]).flatten(0, -3)
        right = b.expand(*batch, *b.shape[-2:]).flatten(0, -3)
        product = torch.ops.amp_fx.float32_product(left, right, low_dtype)
        product = product.reshape(*batch, a.shape[-2], b.shape[-1])
    product = product.squeeze(-2) if is_row else product
    return product.squeeze(-1) if is_column else product


@torch.library.register_vmap(FLOAT32_PRODUCT, lib=_library)  # type: ignore[untyped-decorator]
def _vmap(
    _: Any,
    in_dims: tuple[int | None, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    low_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, int]:
    a, b = (x if d is None else x.movedim(d, 0) for x, d in zip((a, b), in_dims[:2], strict=True))
    return _any_dims(a, b, low_dtype), 0
