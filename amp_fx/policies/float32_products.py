"""Computes products of low-precision factors with float32 results, forward and backward.

Routers of mixtures of experts and output heads need results that are not rounded. CUDA and XPU have
kernels for such products (``out_dtype`` of ``torch.mm``). The CPU has none, and computes a float32
product of rounded factors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import is_dtensor
from amp_fx.policies.calls import bind, is_eligible, qualified_name
from amp_fx.policies.rounding import round_to, rounded
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
"""The qualified name of the op in graphs."""

WITH_OUT_DTYPE = ("cuda", "xpu")
"""Device types with kernels for ``out_dtype`` of ``torch.mm``."""

_library = torch.library.Library("amp_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "float32_product(Tensor self, Tensor mat2, ScalarType low_dtype) -> Tensor"
)


@torch.library.impl(_library, "float32_product", "CompositeImplicitAutograd")
def _float32_product(a: torch.Tensor, b: torch.Tensor, low_dtype: torch.dtype) -> torch.Tensor:
    """Multiplies two matrices, or two batches of matrices, with low-precision instructions.

    Args:
        a: Floating point, of shape ``[n, k]`` or ``[batch, n, k]``.
        b: Floating point, of shape ``[k, m]`` or ``[batch, k, m]``.
        low_dtype: The dtype to which factors are rounded.

    Returns:
        float32, of shape ``[n, m]`` or ``[batch, n, m]``.
    """
    product: torch.Tensor = apply_in_op(_Float32Product, a, b, low_dtype)
    return product


class _Float32Product(torch.autograd.Function):
    """Computes the products of the backward like that of the forward, with float32 results."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, low_dtype: torch.dtype) -> torch.Tensor:
        if are_transforms_active():  # outer transforms must differentiate the op as well
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


def _product(a: torch.Tensor, b: torch.Tensor, low_dtype: torch.dtype) -> torch.Tensor:
    product = torch.mm if a.dim() == 2 else torch.bmm
    with DisableTorchFunction(), DisableAutocast():  # a backward may run in an autocast region
        if a.device.type not in WITH_OUT_DTYPE or is_dtensor(a) or is_dtensor(b):
            return product(_in_float32(a, low_dtype), _in_float32(b, low_dtype))
        return product(a.to(low_dtype), b.to(low_dtype), out_dtype=torch.float32)


def _in_float32(tensor: torch.Tensor, low_dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor in float32, rounded to ``low_dtype``."""
    if tensor.dtype == low_dtype:
        return tensor.to(torch.float32)
    return round_to(tensor.to(torch.float32), low_dtype)


_KERNELS = (
    _float32_product,
    _product,
    _in_float32,
    is_dtensor,
    round_to,
    rounded,
    apply_in_op,
    below_transform,
)


def can_give_float32(call: Call, device_type: str) -> bool:
    """Returns True if autocast may cast both factors of a call and both are strided.

    Args:
        call: A call of an op of ``tables.float8.PRODUCTS``.
        device_type: The device type of the region.
    """
    operands, bound = PRODUCTS[qualified_name(call[0])], bind(*call)
    factors = [bound[operands.input], bound[operands.weight]]
    return all(
        is_eligible(factor, device_type) and factor.layout is torch.strided and not factor.is_nested
        for factor in factors
    )


def run_with_float32_result(call: Call, low_dtype: torch.dtype) -> torch.Tensor:
    """Computes a call of an op of ``tables.float8.PRODUCTS`` with a float32 result.

    The bias is not rounded, because it is not an operand of the product.

    Args:
        call: The call.
        low_dtype: The low dtype of the region.
    """
    skip_frames_of(_Float32Product, *_KERNELS)
    operands, bound = PRODUCTS[qualified_name(call[0])], bind(*call)
    a, b, bias = bound[operands.input], bound[operands.weight], bound.get(operands.bias)
    b = b.mT if operands.has_rows_of_outputs and b.dim() > 1 else b
    product: torch.Tensor = _any_dims(a, b, low_dtype)
    if bias is None:
        return product
    alpha, beta = bound.get("alpha", 1), bound.get("beta", 1)
    product = product if alpha == 1 else product * alpha
    if beta != 0:  # with 0, torch ignores the bias, even if it is not finite
        bias = bias.to(torch.float32)
        product = product + (bias if beta == 1 else bias * beta)
    return product


def _any_dims(a: torch.Tensor, b: torch.Tensor, low_dtype: torch.dtype) -> Any:
    """Multiplies vectors, matrices and batches with the broadcasting of ``torch.matmul``."""
    is_row, is_column = a.dim() == 1, b.dim() == 1
    a = a.unsqueeze(0) if is_row else a
    b = b.unsqueeze(1) if is_column else b
    if b.dim() == 2:  # one product for all batch elements of ``a``
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
    low_dtype: torch.dtype,
) -> tuple[torch.Tensor, int]:
    a, b = (x if d is None else x.movedim(d, 0) for x, d in zip((a, b), in_dims[:2], strict=True))
    return _any_dims(a, b, low_dtype), 0
