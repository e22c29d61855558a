"""Runs one product in float8: what fits, how operands are quantized, forward and backward.

The numbers are those of torchao's ``Float8Linear`` with the same recipe, bit for bit. A weight is
quantized as it is stored, without rounding to the low dtype first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from amp_fx.devices.float8 import why_no_float8
from amp_fx.dtypes import dtype_name
from amp_fx.policies.calls import bind, qualified_name
from amp_fx.tables.float8 import EXPERTS, LIMITS, MULTIPLE, PRODUCTS, RECIPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amp_fx.policies.calls import Call
    from amp_fx.tables.float8 import Float8, Operands, Scaling

    Quantized = tuple[torch.Tensor, torch.Tensor]

_OPERANDS = {**PRODUCTS, **EXPERTS}
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


def operands_of(op: object) -> Operands | None:
    """The operands of a product that float8 can be asked for; None for other ops."""
    return _OPERANDS.get(qualified_name(op)) if isinstance(op, torch._ops.OpOverload) else None


def why_not_float8(
    call: Call,
    weight: torch.Tensor,
    low_dtype: torch.dtype,
    settings: Float8,
    *,
    has_rows_of_outputs: bool,
) -> str:
    """Returns why a product stays in the low dtype; an empty string if it runs in float8.

    Args:
        call: A call of an op of ``PRODUCTS`` or ``EXPERTS``, with real or fake tensors.
        weight: Its weight as it is stored.
        low_dtype: The dtype of the region.
        settings: Those of the policy.
        has_rows_of_outputs: Whether the weight as it is stored is ``[outputs, inputs]``.
    """
    name, bound = qualified_name(call[0]), bind(*call)
    given: torch.Tensor = bound[_OPERANDS[name].input]
    if name in EXPERTS:
        return (
            "it is a product of experts, which needs torch._scaled_grouped_mm: that runs on GPUs "
            "of compute capability 9.0 alone, and amp_fx does not use it"
        )
    if low_dtype is not torch.bfloat16:
        return f"float8 products give bfloat16, and the region's dtype is {dtype_name(low_dtype)}"
    if why := why_no_float8(given.device):
        return why
    if weight.layout is not torch.strided or _is_subclass(weight):
        return f"the weight is a {type(weight).__name__} with layout {weight.layout}"
    if weight.dtype not in _WEIGHT_DTYPES:
        return f"the weight is stored in {dtype_name(weight.dtype)}"
    if weight.dim() != 2:
        return f"the weight has {weight.dim()} dimensions"
    if any(bound.get(name, 1) != 1 for name in ("alpha", "beta")):
        return "alpha and beta are not 1"
    if any(size == 0 for size in given.shape if isinstance(size, int)):
        return "the batch is empty"
    rows, columns = weight.shape
    num_out, num_in = (rows, columns) if has_rows_of_outputs else (columns, rows)
    return _why_not_of_sizes(num_out, num_in, settings)


def _is_subclass(weight: torch.Tensor) -> bool:
    plain = (torch.Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor)
    return type(weight) not in plain


def _why_not_of_sizes(num_out: int, num_in: int, settings: Float8) -> str:
    for what, size, least in (
        ("outputs", num_out, settings.least_out),
        ("inputs", num_in, settings.least_in),
    ):
        if size % MULTIPLE or not size:
            return f"its {size} {what} are not a multiple of {MULTIPLE}"
        if size < least:
            return f"its {size} {what} are fewer than {least}"
    return ""


def quantize(
    tensor: torch.Tensor,
    scaling: Scaling,
    dim: int,
    *,
    has_power_of_two_scales: bool,
    largest: torch.Tensor | None = None,
) -> Quantized:
    """Quantizes a tensor with scales that bring its largest elements to the dtype's limit.

    Args:
        tensor: A matrix, or more of them.
        scaling: The dtype, and how many scales.
        dim: The dimension that the product sums over.
        has_power_of_two_scales: Whether scales are rounded down to powers of two.
        largest: The largest magnitudes that the scales are of, if they are known.

    Returns:
        The data, and the float32 factors that undo the scales: one, or one for each index of the
        other dimensions.
    """
    if largest is None:
        magnitude = tensor.abs()
        largest = magnitude.amax(dim, keepdim=True) if scaling.is_by_row else magnitude.max()
    limit = LIMITS[scaling.dtype]
    scale = (limit / largest.to(torch.float64).clamp(min=1e-12)).to(torch.float32)
    if has_power_of_two_scales:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    data = (tensor.to(torch.float32) * scale).clamp(-limit, limit).to(scaling.dtype)
    return data, scale.reciprocal()


def _float8_weight(
    weight: torch.Tensor,
    recipe: str,
    has_rows_of_outputs: bool,
    is_back: bool,
    largest: torch.Tensor | None = None,
) -> Quantized:
    matrix, found = weight.detach(), RECIPES[recipe]
    matrix = matrix if has_rows_of_outputs else matrix.t()
    scaling, dim = (found.weight_back, 0) if is_back else (found.forward, 1)
    data, factors = quantize(
        matrix,
        scaling,
        dim,
        has_power_of_two_scales=found.has_power_of_two_scales,
        largest=largest,
    )
    return (data.t() if is_back else data).contiguous(), factors


def both_float8_weights(
    weight: torch.Tensor, recipe: str, has_rows_of_outputs: bool
) -> tuple[Quantized, Quantized]:
    """``float8_weight`` for the product and for its backward, which looks for maxima once.

    The largest element of the whole weight is the largest one of those of its rows.
    """
    found = RECIPES[recipe]
    if found.weight_back.is_by_row:
        largest = back = None
    else:
        matrix = weight.detach() if has_rows_of_outputs else weight.detach().t()
        rows = matrix.abs().amax(1, keepdim=True)
        back = rows.max()
        largest = rows if found.forward.is_by_row else back
    return (
        _float8_weight(weight, recipe, has_rows_of_outputs, False, largest),
        _float8_weight(weight, recipe, has_rows_of_outputs, True, back),
    )


def _scaled_product(
    left: Quantized, right: Quantized, dtype: torch.dtype, *, is_fast: bool = False
) -> torch.Tensor:
    """The product of two quantized matrices.

    Args:
        left: ``[rows, inner]``, with one factor or ``[rows, 1]``.
        right: ``[inner, columns]``, with one factor or ``[1, columns]``.
        dtype: Of the result.
        is_fast: Whether GPUs may add up in fewer bits.
    """
    (a, a_factors), (b, b_factors) = left, right
    a = a if a.stride(-1) == 1 else a.contiguous()
    b = b if b.stride(0) == 1 else b.t().contiguous().t()
    if a_factors.dim() != b_factors.dim():
        a_factors = a_factors.expand(a.shape[0], 1).contiguous()
        b_factors = b_factors.expand(1, b.shape[1]).contiguous()
    if a_factors.dim() == 0 or is_fast:
        return torch._scaled_mm(
            a, b, scale_a=a_factors, scale_b=b_factors, out_dtype=dtype, use_fast_accum=is_fast
        )
    # By rows, kernels that add up in full are slow: the factors come behind the product.
    one = a_factors.new_ones(())
    product = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=dtype)
    return product.mul_(a_factors * b_factors)


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, recipe: str, *weights: Any) -> torch.Tensor:
        found = RECIPES[recipe]
        is_rounded = found.has_power_of_two_scales
        # As in torchao, it is quantized as it comes: in rows, inductor would fuse other ops.
        quantized = quantize(x, found.forward, -1, has_power_of_two_scales=is_rounded)
        data, factors, *back, has_rows_of_outputs = weights
        ctx.recipe, ctx.shape, ctx.has_rows_of_outputs = found, x.shape, has_rows_of_outputs
        ctx.weight_dtype = None if weight is None else weight.dtype
        # One scale serves both products that read the input: its quantized form is saved.
        is_shared = found.has_float8_weight_grads and not found.forward.is_by_row
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
    """The gradient of a weight as a product in float8."""
    left, right = quantized, (data, factors)
    if factors is None:
        is_rounded = recipe.has_power_of_two_scales
        left = quantize(grad, recipe.grad, 0, has_power_of_two_scales=is_rounded)
        right = quantize(data, recipe.forward, 0, has_power_of_two_scales=is_rounded)
    left = _filled_up(left[0]).t(), left[1].t() if left[1].dim() else left[1]
    return _scaled_product(left, (_filled_up(right[0]), right[1]), grad.dtype)


def _filled_up(data: torch.Tensor) -> torch.Tensor:
    """Adds rows of zeros up to a multiple of 16: GPUs need them, and sums do not notice."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    num_rows = data.shape[0]
    # One row turned is a column, whose strides inductor does not let anybody choose.
    if data.device.type == "cpu" and not statically_known_true(num_rows == 1):
        return data
    if statically_known_true(num_rows % MULTIPLE == 0):
        return data
    missing = -num_rows % MULTIPLE
    filled = torch.nn.functional.pad(data.view(torch.uint8), (0, 0, 0, missing))
    return filled.view(data.dtype)


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
    result: torch.Tensor = _Float8Product.apply(  # type: ignore[no-untyped-call]
        x, weight, recipe, data, factors, data_back, factors_back, has_rows_of_outputs
    )
    return result


_library = torch.library.Library("amp_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_COMPOSITE = "CompositeImplicitAutograd"  # traced through: compiled graphs hold neither op

_library.define(
    "float8_weight(Tensor weight, str recipe, bool has_rows_of_outputs, bool is_back)"
    " -> (Tensor, Tensor)"
)  # type: ignore[no-untyped-call]
_library.impl("float8_weight", _float8_weight, _COMPOSITE)  # type: ignore[no-untyped-call]
_library.define(
    "float8_product(Tensor x, Tensor? weight, str recipe, Tensor data, Tensor factors,"
    " Tensor? data_back, Tensor? factors_back, bool has_rows_of_outputs) -> Tensor"
)  # type: ignore[no-untyped-call]
_library.impl("float8_product", _float8_product, _COMPOSITE)  # type: ignore[no-untyped-call]

float8_weight = torch.ops.amp_fx.float8_weight.default
"""Quantizes a weight: the data with the factors that undo the scales.

The data are ``[outputs, inputs]`` for the product itself, and ``[inputs, outputs]`` for the
gradient of its input (``is_back``), so that no call lays them out anew.
"""

float8_product = torch.ops.amp_fx.float8_product.default
"""The product of an input in the low dtype with a quantized weight; differentiable.

``weight`` is the weight itself, which its gradient goes to; None if it needs none.
"""


def weight_of(call: Call) -> tuple[torch.Tensor | None, bool]:
    """The weight of a product, a parameter or a transposed one, and if its rows are outputs."""
    operands = _OPERANDS[qualified_name(call[0])]
    given, has_rows = bind(*call)[operands.weight], operands.has_rows_of_outputs
    if isinstance(given, torch.nn.Parameter):
        return given, has_rows
    base = turned_base(given)
    return (base, not has_rows) if isinstance(base, torch.nn.Parameter) else (None, has_rows)


def turned_base(given: torch.Tensor) -> torch.Tensor | None:
    """The matrix, or matrices, that a tensor is the transposed view of; None for others."""
    base = given._base if given._is_view() else None
    if base is None or base.dim() not in (2, 3):
        return None
    turned = base.mT
    is_turned = (given.shape, given.stride()) == (turned.shape, turned.stride())
    is_same = is_turned and given.storage_offset() == base.storage_offset()
    is_differentiable = not torch.is_grad_enabled() or given.requires_grad == base.requires_grad
    return base if is_same and is_differentiable else None


def run_float8(
    call: Call, weight: torch.Tensor, recipe: str, *, has_rows_of_outputs: bool
) -> torch.Tensor:
    """Runs a product in float8, in eager code.

    Args:
        call: The call with its inputs in the low dtype.
        weight: Its weight as it is stored.
        recipe: A name of ``RECIPES``.
        has_rows_of_outputs: Whether the weight is ``[outputs, inputs]``.
    """
    operands, bound = PRODUCTS[qualified_name(call[0])], bind(*call)
    x, has_rows = bound[operands.input], has_rows_of_outputs
    has_gradient = torch.is_grad_enabled()
    is_back = has_gradient and x.requires_grad
    own = weight if has_gradient and weight.requires_grad else None

    def run() -> torch.Tensor:
        quantized = float8_weight(weight, recipe, has_rows, False)
        back = float8_weight(weight, recipe, has_rows, True) if is_back else (None, None)
        result: torch.Tensor = float8_product(x, own, recipe, *quantized, *back, has_rows)
        return result

    mode: Any = _get_current_dispatch_mode()
    if hasattr(mode, "run_float8"):  # amp_fx.accuracy measures it as one op
        result: torch.Tensor = mode.run_float8(run, x, weight, recipe, has_rows)
    else:
        result = run()
    bias = bound.get(operands.bias)
    return result if bias is None else result + bias
