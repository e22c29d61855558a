"""Computes one product of low inputs with a float32 result, forward and backward.

Routers of mixtures of experts and output heads need it: the inputs are those of a low product, and
nothing is rounded after it. CUDA and XPU have kernels for it (``out_dtype`` of ``torch.mm``). A
CPU's product is in float32, of rounded inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import is_spread
from amp_fx.policies.calls import bind, is_eligible, qualified_name
from amp_fx.policies.rounding import round_to, rounded
from amp_fx.tables.float8 import PRODUCTS
from amp_fx.torch_private.autograd import skip_frames_of

if TYPE_CHECKING:
    from amp_fx.policies.calls import Call

FLOAT32_PRODUCT = "amp_fx::float32_product"
"""The qualified name of the op that is in graphs."""

WITH_OUT_DTYPE = ("cuda", "xpu")

_library = torch.library.Library("amp_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "float32_product(Tensor self, Tensor mat2, ScalarType low_dtype) -> Tensor"
)


@torch.library.impl(_library, "float32_product", "CompositeImplicitAutograd")
def _float32_product(a: torch.Tensor, b: torch.Tensor, low_dtype: torch.dtype) -> torch.Tensor:
    """Multiplies ``[n, k]`` and ``[k, m]``, or batches of them, rounded to a low dtype.

    Args:
        a: ``[n, k]`` or ``[batch, n, k]``, floating point.
        b: ``[k, m]`` or ``[batch, k, m]``.
        low_dtype: The dtype that inputs are rounded to.

    Returns:
        float32, ``[n, m]`` or ``[batch, n, m]``.
    """
    product: torch.Tensor = _Float32Product.apply(a, b, low_dtype)  # type: ignore[no-untyped-call]
    return product


class _Float32Product(torch.autograd.Function):
    """Rounds the inputs of the products of the backward, too, and none of their results."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, low_dtype: torch.dtype) -> torch.Tensor:
        return _product(a, b, low_dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: torch.Tensor) -> None:
        a, b, ctx.low_dtype = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = torch.ops.amp_fx.float32_product(grads[0], b.mT, ctx.low_dtype).to(a.dtype)
        if ctx.needs_input_grad[1]:
            grad_b = torch.ops.amp_fx.float32_product(a.mT, grads[0], ctx.low_dtype).to(b.dtype)
        return grad_a, grad_b, None


def _product(a: torch.Tensor, b: torch.Tensor, low_dtype: torch.dtype) -> torch.Tensor:
    product = torch.mm if a.dim() == 2 else torch.bmm
    if a.device.type in WITH_OUT_DTYPE and not (is_spread(a) or is_spread(b)):
        return product(a.to(low_dtype), b.to(low_dtype), out_dtype=torch.float32)
    return product(_rounded(a, low_dtype), _rounded(b, low_dtype))


def _rounded(tensor: torch.Tensor, low_dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor in float32, rounded to a low dtype."""
    if tensor.dtype == low_dtype or is_spread(tensor):
        return tensor.to(low_dtype).to(torch.float32)
    return round_to(tensor.to(torch.float32), low_dtype)


_KERNELS = (_float32_product, _product, _rounded, is_spread, round_to, rounded)


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


def run_with_float32_result(call: Call, low_dtype: torch.dtype) -> torch.Tensor:
    """Computes a call of an op of ``tables.products.FLOAT32_PRODUCTS`` with a float32 result.

    What is added, a bias, is taken as it is: it is no input of the product.
    """
    skip_frames_of(_Float32Product, *_KERNELS)
    operands, bound = PRODUCTS[qualified_name(call[0])], bind(*call)
    a, b, added = bound[operands.input], bound[operands.weight], bound.get(operands.bias)
    b = b.mT if operands.has_rows_of_outputs and b.dim() > 1 else b
    product: torch.Tensor = _any_dims(a, b, low_dtype)
    if added is None:
        return product
    alpha, beta = bound.get("alpha", 1), bound.get("beta", 1)
    product = product if alpha == 1 else product * alpha
    if beta != 0:  # else torch ignores what is added, also where it is not finite
        added = added.to(torch.float32)
        product = product + (added if beta == 1 else added * beta)
    return product


def _any_dims(a: torch.Tensor, b: torch.Tensor, low_dtype: torch.dtype) -> Any:
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
    low_dtype: torch.dtype,
) -> tuple[torch.Tensor, int]:
    a, b = (x if d is None else x.movedim(d, 0) for x, d in zip((a, b), in_dims[:2], strict=True))
    return _any_dims(a, b, low_dtype), 0
