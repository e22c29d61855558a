"""Computes products in float8, forward and backward, and checks which products support it.

Results are bitwise equal to those of torchao's ``Float8Linear`` with the same recipe. Weights are
quantized as stored, or after rounding to bfloat16 if the policy requires it (``Float8.source``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.devices.float8 import why_no_float8, why_no_float8_experts
from amp_fx.dtypes import dtype_name, is_dtensor
from amp_fx.policies.calls import bind, qualified_name
from amp_fx.policies.rounding import round_to
from amp_fx.tables.float8 import BY_ROW, LIMITS, MULTIPLE, PRODUCTS, RECIPES, SOURCES
from amp_fx.torch_private.autograd import skip_frames_of
from amp_fx.torch_private.fake_tensors import FakeTensor
from amp_fx.torch_private.kernels import scaled_grouped_mm, scaled_mm
from amp_fx.torch_private.modes import current_dispatch_mode
from amp_fx.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amp_fx.policies.calls import Call
    from amp_fx.tables.float8 import Float8, Operands, Scaling

    Quantized = tuple[torch.Tensor, torch.Tensor]

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


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
    if weight.layout is not torch.strided or _is_foreign(weight):
        return f"the weight is a {type(weight).__name__} with layout {weight.layout}"
    if weight.dtype not in _WEIGHT_DTYPES:
        return f"the weight is stored in {dtype_name(weight.dtype)}"
    if why := _why_not_of_experts(operands, bound, weight, settings):
        return why
    if any(bound.get(name, 1) != 1 for name in ("alpha", "beta")):
        return "alpha and beta are not 1"
    if any(size == 0 for size in x.shape if isinstance(size, int)):
        return "the batch is empty"
    local_sizes = _local_sizes(weight)
    if local_sizes is None:
        return "the shards of the weight have different sizes"
    rows, columns = local_sizes
    num_out, num_in = (rows, columns) if has_rows_of_outputs else (columns, rows)
    return _why_not_of_sizes(num_out, num_in, settings)


def _why_not_of_experts(
    operands: Operands, bound: dict[str, Any], weight: torch.Tensor, settings: Float8
) -> str:
    """Returns the reason why a product with one weight per expert cannot run in float8."""
    x, offsets = bound[operands.input], bound.get(operands.offsets)
    is_batched = x.dim() == 3 and x.shape[0] == weight.shape[0] and offsets is None
    is_grouped = x.dim() == 2 and offsets is not None
    if weight.dim() == 2 and not operands.offsets:
        return ""
    if weight.dim() != 3 or not (is_batched or is_grouped):
        return f"the weight has {weight.dim()} dimensions, and the input {x.dim()}"
    if why := why_no_float8_experts(weight.device):
        return f"it is a product of experts, and {why}"
    if settings.recipe != "rowwise":
        return f"products of experts require the recipe rowwise, not {settings.recipe}"
    has_bias = bool(operands.offsets) and bound.get("bias") is not None
    if has_bias or bound.get("out_dtype") not in (None, torch.bfloat16):
        return "torch._scaled_grouped_mm returns bfloat16 and has no bias"
    return ""


def _is_foreign(weight: torch.Tensor) -> bool:
    plain = (torch.Tensor, torch.nn.Parameter, FakeTensor)
    return type(weight) not in plain and not (is_dtensor(weight) and weight.dim() == 2)


def _local_sizes(weight: Any) -> tuple[int, int] | None:
    """Returns the local rows and columns of a matrix, or None if they differ between ranks."""
    sizes = list(weight.shape)
    for dim, placement in enumerate(weight.placements if is_dtensor(weight) else ()):
        if placement.is_shard():
            sizes[placement.dim], rest = divmod(sizes[placement.dim], weight.device_mesh.size(dim))
            if rest:
                return None
    return sizes[-2], sizes[-1]


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
        tensor: A matrix or a batch of matrices.
        scaling: The float8 dtype, and the granularity of scales.
        dim: The dimension over which the product sums.
        has_power_of_two_scales: If True, scales are rounded down to powers of two.

    Returns:
        The float8 data, and the float32 factors that undo the scales: one for the tensor, or one
        for each index of the other dimensions.
    """
    magnitude = tensor.abs()
    largest = magnitude.amax(dim, keepdim=True) if scaling.is_by_row else magnitude.max()
    scale = _scales(largest, scaling, has_power_of_two_scales)
    return _scaled(tensor, scale, scaling), scale.reciprocal()


def _scales(largest: torch.Tensor, scaling: Scaling, has_power_of_two_scales: bool) -> torch.Tensor:
    scale = LIMITS[scaling.dtype] / largest.to(torch.float64).clamp(min=1e-12)
    scale = scale.to(torch.float32)
    if has_power_of_two_scales:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def _scaled(tensor: torch.Tensor, scale: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    limit = LIMITS[scaling.dtype]
    return (tensor.to(torch.float32) * scale).clamp(-limit, limit).to(scaling.dtype)


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
    if is_dtensor(a):
        return _dtensor_product(left, right, dtype, is_fast)
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


def _dtensor_product(left: Any, right: Any, dtype: torch.dtype, is_fast: bool) -> torch.Tensor:
    """Multiplies quantized DTensors; each rank multiplies its shards.

    Scales are computed from the full tensors, so that shards are quantized like the full tensors.
    torch's sharding rule for ``_scaled_mm`` gathers float8 data, which some process groups do not
    support.
    """
    from torch.distributed.tensor import DTensor, Replicate

    (a, a_factors), (b, b_factors) = left, right
    mesh, pairs = a.device_mesh, zip(a.placements, b.placements, strict=True)
    of_a, of_b, of_result = zip(*[_placements_of_product(*pair) for pair in pairs], strict=True)

    def local_shard(tensor: Any, placements: Any) -> torch.Tensor:
        shard: torch.Tensor = tensor.redistribute(mesh, placements).to_local()
        return shard

    def local_factors(tensor: Any, placements: Any, dim: int) -> torch.Tensor:
        """Redistributes factors like the data if the data are sharded by rows or columns."""
        has_dim = tensor.dim() > 0
        sharded = [p if has_dim and p.is_shard(dim) else Replicate() for p in placements]
        return local_shard(tensor, sharded)

    product = _scaled_product(
        (local_shard(a, of_a), local_factors(a_factors, of_a, 0)),
        (local_shard(b, of_b), local_factors(b_factors, of_b, 1)),
        dtype,
        is_fast=is_fast,
    )
    shape = torch.Size([a.shape[0], b.shape[1]])
    result: torch.Tensor = DTensor.from_local(
        product, mesh, of_result, run_check=False, shape=shape, stride=(shape[1], 1)
    )
    return result


def _placements_of_product(a: Any, b: Any) -> tuple[Any, Any, Any]:
    """Returns the placements of two matrices and of their product on one mesh dimension."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if b.is_shard(0) or (a.is_shard(1) and not b.is_shard(1)):  # the dimension of the sum
        return Shard(1), Shard(0), Partial()
    if b.is_shard(1):
        return Replicate(), b, Shard(1)
    return (a, Replicate(), Shard(0)) if a.is_shard(0) else (Replicate(),) * 3


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

    num_rows = data.shape[-2]
    # A single row is padded on the CPU, too: inductor chooses the strides of a transposed row.
    if data.device.type == "cpu" and data.dim() == 2 and not statically_known_true(num_rows == 1):
        return data
    if statically_known_true(num_rows % MULTIPLE == 0):
        return data
    missing = -num_rows % MULTIPLE
    padded = torch.nn.functional.pad(data.view(torch.uint8), (0, 0, 0, missing))
    return padded.view(data.dtype)


class _Float8Experts(torch.autograd.Function):
    """Products with one weight per expert, ``[experts, outputs, inputs]``, in the recipe rowwise.

    Results equal those of torchao's ``_to_fp8_rowwise_then_scaled_grouped_mm``. Without offsets,
    the input is ``[experts, rows, inputs]``. With offsets, it is ``[rows, inputs]``, and the
    offsets are the ends of the rows of each expert.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, offsets: Any, *weights: Any) -> Any:
        data, factors, *back, has_rows_of_outputs = weights
        ctx.has_rows_of_outputs = has_rows_of_outputs
        ctx.weight_dtype = None if weight is None else weight.dtype
        has_weight_grad = weight is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(x if has_weight_grad else None, offsets, *back)
        return _grouped_product(_by_row(x), (data.mT, factors), offsets)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, offsets, weight, weight_factors = ctx.saved_tensors
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            right = weight.mT, weight_factors
            grad_input = _grouped_product(_by_row(grads[0]), right, offsets)
        if ctx.needs_input_grad[1]:
            columns, offsets = _columns_of_experts((grads[0], x), offsets)
            (grad, factors), right = columns
            grad_weight = _grouped_product((grad.mT, factors), right, offsets)
            grad_weight = grad_weight if ctx.has_rows_of_outputs else grad_weight.mT
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return grad_input, grad_weight, None, None, None, None, None, None


def _by_row(tensor: torch.Tensor, dim: int = -1) -> Quantized:
    return quantize(tensor, BY_ROW, dim, has_power_of_two_scales=True)


def _grouped_product(left: Quantized, right: Quantized, offsets: Any) -> torch.Tensor:
    """Computes the products of all experts.

    Args:
        left: ``[rows, inner]`` or ``[experts, rows, inner]``, with one factor per row.
        right: ``[inner, columns]`` or ``[experts, inner, columns]``, with one factor per column.
        offsets: The ends of the rows of each expert. If both operands are matrices, the ends of the
            inner dimension of each expert.
    """
    (a, a_factors), (b, b_factors) = left, right
    return scaled_grouped_mm(
        a.contiguous(),
        b.mT.contiguous().mT,
        a_factors.flatten(-2),
        b_factors.flatten(-2),
        offs=offsets,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _columns_of_experts(
    tensors: tuple[torch.Tensor, torch.Tensor], offsets: torch.Tensor | None
) -> tuple[list[Quantized], torch.Tensor | None]:
    """Quantizes the columns of each expert, and pads its rows with zeros to a multiple of 16.

    Args:
        tensors: ``[experts, rows, columns]``, or ``[rows, columns]`` with offsets.
        offsets: The ends of the rows of each expert.

    Returns:
        The data with factors for each expert's columns, and the ends of the padded rows.
    """
    if offsets is None:
        pairs = [_by_row(tensor, -2) for tensor in tensors]
        return [(_pad_rows(data), factors) for data, factors in pairs], None
    num_rows, num_experts = tensors[0].shape[0], offsets.shape[0]
    rows = torch.arange(num_rows, device=offsets.device)
    expert = torch.searchsorted(offsets, rows, right=True)
    sizes = offsets.diff(prepend=offsets.new_zeros(1))
    missing = (-sizes) % MULTIPLE
    ends = (sizes + missing).cumsum(0)
    # Rows after those of the last expert belong to no expert: all are copied to the last row.
    size = num_rows + (-num_rows) % MULTIPLE + MULTIPLE * num_experts
    shifts = missing.cumsum(0) - missing
    targets = rows + shifts[expert.clamp(max=num_experts - 1)]
    targets = torch.where(expert < num_experts, targets, size - 1)
    quantized = []
    for tensor in tensors:
        largest = tensor.new_zeros(num_experts + 1, tensor.shape[1])
        index = expert[:, None].expand_as(tensor)
        largest = largest.scatter_reduce(0, index, tensor.abs(), "amax")
        scale = _scales(largest, BY_ROW, True)
        data = _scaled(tensor, scale[expert], BY_ROW).view(torch.uint8)
        padded = data.new_zeros(size, data.shape[1]).index_copy(0, targets, data)
        quantized.append((padded.view(BY_ROW.dtype), scale[:-1].reciprocal()))
    return quantized, ends.to(torch.int32)


def _float8_product(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    recipe: str,
    data: torch.Tensor,
    factors: torch.Tensor,
    data_back: torch.Tensor | None,
    factors_back: torch.Tensor | None,
    has_rows_of_outputs: bool,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    weights = data, factors, data_back, factors_back, has_rows_of_outputs
    function, setting = (_Float8Product, recipe) if data.dim() == 2 else (_Float8Experts, offsets)
    skip_frames_of(function, _float8_product)
    result: torch.Tensor = function.apply(x, weight, setting, *weights)  # type: ignore[no-untyped-call]
    return result


_library = torch.library.Library("amp_fx", "FRAGMENT")  # type: ignore[no-untyped-call]
_COMPOSITE = "CompositeImplicitAutograd"  # decomposed: compiled graphs contain neither op

_library.define(
    "float8_weight(Tensor weight, str recipe, bool has_rows_of_outputs, bool is_back,"
    " str source='stored') -> (Tensor, Tensor)"
)  # type: ignore[no-untyped-call]
_library.impl("float8_weight", _float8_weight, _COMPOSITE)  # type: ignore[no-untyped-call]
_library.define(
    "float8_product(Tensor x, Tensor? weight, str recipe, Tensor data, Tensor factors,"
    " Tensor? data_back, Tensor? factors_back, bool has_rows_of_outputs, Tensor? offsets=None)"
    " -> Tensor"
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
``offsets`` are the ends of the rows of each expert, if there is one weight per expert.
"""


def weight_of(call: Call) -> tuple[torch.Tensor | None, bool]:
    """Returns the parameter that is the weight of a product, and True if its rows are outputs.

    The argument of the call may also be the transposed parameter.
    """
    operands = PRODUCTS[qualified_name(call[0])]
    argument, has_rows = bind(*call)[operands.weight], operands.has_rows_of_outputs
    if isinstance(argument, torch.nn.Parameter):
        return argument, has_rows
    base = transposed_base(argument)
    return (base, not has_rows) if isinstance(base, torch.nn.Parameter) else (None, has_rows)


def transposed_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the base of a tensor if the tensor is its transpose (``mT``), otherwise None."""
    base = tensor._base if tensor._is_view() else None
    if base is None or base.dim() not in (2, 3):
        return None
    transposed = base.mT
    is_transpose = (tensor.shape, tensor.stride()) == (transposed.shape, transposed.stride())
    is_same = is_transpose and tensor.storage_offset() == base.storage_offset()
    is_differentiable = not torch.is_grad_enabled() or tensor.requires_grad == base.requires_grad
    return base if is_same and is_differentiable else None


def run_float8(
    call: Call, weight: torch.Tensor, settings: Float8, *, has_rows_of_outputs: bool
) -> torch.Tensor:
    """Computes a product in float8 in eager code.

    Args:
        call: The call with its inputs in the low dtype.
        weight: The stored weight.
        settings: The float8 settings of the policy.
        has_rows_of_outputs: True if the weight is ``[outputs, inputs]``.
    """
    recipe, source = settings.recipe, settings.source
    operands, bound = PRODUCTS[qualified_name(call[0])], bind(*call)
    x, has_rows = bound[operands.input], has_rows_of_outputs
    offsets = bound.get(operands.offsets)
    has_gradient = torch.is_grad_enabled()
    is_back = has_gradient and x.requires_grad
    differentiable_weight = weight if has_gradient and weight.requires_grad else None

    def run() -> torch.Tensor:
        quantized = float8_weight(weight, recipe, has_rows, False, source)
        back = float8_weight(weight, recipe, has_rows, True, source) if is_back else (None, None)
        result: torch.Tensor = float8_product(
            x, differentiable_weight, recipe, *quantized, *back, has_rows, offsets
        )
        return result

    mode: Any = current_dispatch_mode()
    if hasattr(mode, "run_float8"):  # amp_fx.accuracy measures it as one op
        result: torch.Tensor = mode.run_float8(run, x, weight, recipe, has_rows, offsets)
    else:
        result = run()
    bias = bound.get(operands.bias)
    return result if bias is None else result + bias
