"""Computes products in float8, forward and backward, and checks which products support it.

Results are bitwise equal to those of torchao's ``Float8Linear`` with the same recipe. Weights are
quantized as stored, or after rounding to bfloat16 if the policy requires it (``Float8.source``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.devices.float8 import why_no_float8
from amp_fx.dtypes import dtype_name
from amp_fx.policies.calls import bind, qualified_name
from amp_fx.policies.rounding import round_to
from amp_fx.tables.float8 import LIMITS, MULTIPLE, PRODUCTS, RECIPES, SOURCES
from amp_fx.torch_private.autograd import skip_frames_of
from amp_fx.torch_private.fake_tensors import FakeTensor
from amp_fx.torch_private.kernels import scaled_mm
from amp_fx.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amp_fx.policies.calls import Call
    from amp_fx.tables.float8 import Float8, Operands, Scaling

    Quantized = tuple[torch.Tensor, torch.Tensor]

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
_WEIGHT_CLASSES = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def operands_of(op: object) -> Operands | None:
    """Returns the operands of a product that float8 supports, or None for other ops."""
    return PRODUCTS.get(qualified_name(op)) if isinstance(op, OpOverload) else None


def why_not_float8(
    call: Call,
    weight: torch.Tensor,
    low_dtype: torch.dtype,
    settings: Float8,
    *,
    has_rows_of_outputs: bool,
) -> str:
    """Returns the reason why a product cannot run in float8, or an empty string if it can.

    Args:
        call: A call of an op of ``PRODUCTS``, with real or fake tensors.
        weight: The stored weight.
        low_dtype: The dtype of the autocast region.
        settings: The float8 settings of the policy.
        has_rows_of_outputs: True if the stored weight is ``[outputs, inputs]``.
    """
    operands, bound = PRODUCTS[qualified_name(call[0])], bind(*call)
    x: torch.Tensor = bound[operands.input]
    if low_dtype is not torch.bfloat16:
        return f"float8 products return bfloat16, but the region's dtype is {dtype_name(low_dtype)}"
    if why := why_no_float8(x.device):
        return why
    if weight.layout is not torch.strided or type(weight) not in _WEIGHT_CLASSES:
        return f"the weight is a {type(weight).__name__} with layout {weight.layout}"
    if weight.dtype not in _WEIGHT_DTYPES:
        return f"the weight is stored in {dtype_name(weight.dtype)}"
    if weight.dim() != 2:
        return f"the weight has {weight.dim()} dimensions"
    if any(bound.get(name, 1) != 1 for name in ("alpha", "beta")):
        return "alpha and beta are not 1"
    if any(size == 0 for size in x.shape if isinstance(size, int)):
        return "the batch is empty"
    rows, columns = weight.shape
    num_out, num_in = (rows, columns) if has_rows_of_outputs else (columns, rows)
    return _why_not_of_sizes(num_out, num_in, settings)


def _why_not_of_sizes(num_out: int, num_in: int, settings: Float8) -> str:
    for name, size, least in (
        ("outputs", num_out, settings.least_out),
        ("inputs", num_in, settings.least_in),
    ):
        if size % MULTIPLE or not size:
            return f"its {size} {name} are not a multiple of {MULTIPLE}"
        if size < least:
            return f"its {size} {name} are fewer than {least}"
    return ""


def quantize(
    tensor: torch.Tensor, scaling: Scaling, dim: int, *, has_power_of_two_scales: bool
) -> Quantized:
    """Quantizes a tensor with scales that map its largest elements to the maximum of the dtype.

    Args:
        tensor: The tensor.
        scaling: The float8 dtype, and the granularity of scales.
        dim: The dimension over which the product sums.
        has_power_of_two_scales: If True, scales are rounded down to powers of two.

    Returns:
        The float8 data, and the float32 factors that undo the scales: one for the tensor, or one
        for each index of the other dimensions.
    """
    magnitude, limit = tensor.abs(), LIMITS[scaling.dtype]
    largest = magnitude.amax(dim, keepdim=True) if scaling.is_by_row else magnitude.max()
    scale = (limit / largest.to(torch.float64).clamp(min=1e-12)).to(torch.float32)
    if has_power_of_two_scales:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    scaled = (tensor.to(torch.float32) * scale).clamp(-limit, limit).to(scaling.dtype)
    return scaled, scale.reciprocal()


def _float8_weight(
    weight: torch.Tensor,
    recipe: str,
    has_rows_of_outputs: bool,
    is_back: bool,
    source: str = "stored",
) -> Quantized:
    matrix, settings, dtype = weight.detach(), RECIPES[recipe], SOURCES[source]
    if dtype is not None and matrix.dtype != dtype:
        matrix = round_to(matrix, dtype)
    matrix = matrix if has_rows_of_outputs else matrix.mT
    scaling, dim = (settings.weight_back, -2) if is_back else (settings.forward, -1)
    data, factors = quantize(
        matrix, scaling, dim, has_power_of_two_scales=settings.has_power_of_two_scales
    )
    return (data.mT if is_back else data).contiguous(), factors


def _scaled_product(
    left: Quantized, right: Quantized, dtype: torch.dtype, *, is_fast: bool = False
) -> torch.Tensor:
    """Multiplies two quantized matrices.

    Args:
        left: ``[rows, inner]``, with one factor or factors of shape ``[rows, 1]``.
        right: ``[inner, columns]``, with one factor or factors of shape ``[1, columns]``.
        dtype: The dtype of the result.
        is_fast: If True, GPUs may accumulate in fewer bits (``use_fast_accum``).
    """
    (a, a_factors), (b, b_factors) = left, right
    a = a if a.stride(-1) == 1 else a.contiguous()
    b = b if b.stride(0) == 1 else b.t().contiguous().t()
    if a_factors.dim() != b_factors.dim():
        a_factors = a_factors.expand(a.shape[0], 1).contiguous()
        b_factors = b_factors.expand(1, b.shape[1]).contiguous()
    if a_factors.dim() == 0 or is_fast:
        return scaled_mm(
            a, b, scale_a=a_factors, scale_b=b_factors, out_dtype=dtype, use_fast_accum=is_fast
        )
    # Rowwise kernels without fast accumulation are slow: multiply the factors after the product.
    one = a_factors.new_ones(())
    product = scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=dtype)
    return product.mul_(a_factors * b_factors)


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, recipe: str, *weights: Any) -> torch.Tensor:
        settings = RECIPES[recipe]
        is_rounded = settings.has_power_of_two_scales
        # As in torchao, quantize before the reshape to rows: inductor fuses other ops otherwise.
        quantized = quantize(x, settings.forward, -1, has_power_of_two_scales=is_rounded)
        data, factors, *back, has_rows_of_outputs = weights
        ctx.recipe, ctx.shape, ctx.has_rows_of_outputs = settings, x.shape, has_rows_of_outputs
        ctx.weight_dtype = None if weight is None else weight.dtype
        # With one scale, the product of the backward can read the same quantized input: save it.
        is_shared = settings.has_float8_weight_grads and not settings.forward.is_by_row
        saved: Sequence[Any] = (None, None)
        if weight is not None and ctx.needs_input_grad[1]:
            saved = quantized if is_shared else (x, None)
        ctx.save_for_backward(*saved, *back)
        right = data.t(), factors.t() if factors.dim() else factors
        left = _as_rows(quantized[0]), _as_rows(quantized[1])
        product = _scaled_product(left, right, x.dtype, is_fast=True)
        return product.reshape(*x.shape[:-1], data.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        recipe = ctx.recipe
        saved, factors, weight, weight_factors = ctx.saved_tensors
        is_rounded = recipe.has_power_of_two_scales
        grad = _as_rows(grads[0])
        quantized = quantize(grad, recipe.grad, 1, has_power_of_two_scales=is_rounded)
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            right = weight.t(), weight_factors
            grad_input = _scaled_product(quantized, right, grad.dtype).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            data = _as_rows(saved)
            if not recipe.has_float8_weight_grads:
                grad_weight = grad.t() @ data
            else:
                grad_weight = _weight_grad(recipe, grad, quantized, data, factors)
            grad_weight = grad_weight if ctx.has_rows_of_outputs else grad_weight.t()
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return grad_input, grad_weight, None, None, None, None, None, None


def _weight_grad(
    recipe: Any, grad: torch.Tensor, quantized: Quantized, data: torch.Tensor, factors: Any
) -> torch.Tensor:
    """Computes the gradient of a weight as a product in float8."""
    left, right = quantized, (data, factors)
    if factors is None:
        is_rounded = recipe.has_power_of_two_scales
        left = quantize(grad, recipe.grad, 0, has_power_of_two_scales=is_rounded)
        right = quantize(data, recipe.forward, 0, has_power_of_two_scales=is_rounded)
    left = _pad_rows(left[0]).t(), left[1].t() if left[1].dim() else left[1]
    return _scaled_product(left, (_pad_rows(right[0]), right[1]), grad.dtype)


def _pad_rows(data: torch.Tensor) -> torch.Tensor:
    """Pads the rows with zeros to a multiple of 16, which GPUs require; sums do not change."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    num_rows = data.shape[0]
    # A single row is padded on the CPU, too: inductor chooses the strides of a transposed row.
    if data.device.type == "cpu" and not statically_known_true(num_rows == 1):
        return data
    if statically_known_true(num_rows % MULTIPLE == 0):
        return data
    missing = -num_rows % MULTIPLE
    padded = torch.nn.functional.pad(data.view(torch.uint8), (0, 0, 0, missing))
    return padded.view(data.dtype)


def _float8_product(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    recipe: str,
    data: torch.Tensor,
    factors: torch.Tensor,
    data_back: torch.Tensor | None,
    factors_back: torch.Tensor | None,
    has_rows_of_outputs: bool,
) -> torch.Tensor:
    weights = data, factors, data_back, factors_back, has_rows_of_outputs
    skip_frames_of(_Float8Product, *_KERNELS)
    result: torch.Tensor = _Float8Product.apply(x, weight, recipe, *weights)  # type: ignore[no-untyped-call]
    return result


# Every function that the backward calls: Dynamo would compile the others as bare regions, whose
# rounding differs.
_KERNELS = (_float8_product, _scaled_product, _weight_grad, _as_rows, _pad_rows, quantize)


_library = torch.library.Library("amp_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_COMPOSITE = "CompositeImplicitAutograd"  # decomposed: compiled graphs contain neither op

_library.define(
    "float8_weight(Tensor weight, str recipe, bool has_rows_of_outputs, bool is_back,"
    " str source='stored') -> (Tensor, Tensor)"
)  # type: ignore[no-untyped-call]
_library.impl("float8_weight", _float8_weight, _COMPOSITE)  # type: ignore[no-untyped-call]
_library.define(
    "float8_product(Tensor x, Tensor? weight, str recipe, Tensor data, Tensor factors,"
    " Tensor? data_back, Tensor? factors_back, bool has_rows_of_outputs) -> Tensor"
)  # type: ignore[no-untyped-call]
_library.impl("float8_product", _float8_product, _COMPOSITE)  # type: ignore[no-untyped-call]

float8_weight = torch.ops.amp_fx.float8_weight.default
"""Quantizes a weight; returns the data and the factors that undo the scales.

The data are ``[outputs, inputs]`` for the product, and ``[inputs, outputs]`` for the gradient of
the input (``is_back``), so that no call has to transpose them.
"""

float8_product = torch.ops.amp_fx.float8_product.default
"""Multiplies an input in the low dtype with a quantized weight; differentiable.

``weight`` is the original weight, which receives the gradient, or None if it needs no gradient.
"""


def transposed_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the base of a tensor if the tensor is its transpose (``mT``), otherwise None."""
    base = tensor._base if tensor._is_view() else None
    if base is None or base.dim() != 2:
        return None
    transposed = base.mT
    is_transpose = (tensor.shape, tensor.stride()) == (transposed.shape, transposed.stride())
    is_same = is_transpose and tensor.storage_offset() == base.storage_offset()
    is_differentiable = not torch.is_grad_enabled() or tensor.requires_grad == base.requires_grad
    return base if is_same and is_differentiable else None
