"""Traceable Python versions of kernels that call other ops.

Eager autocast casts for the ops inside such a kernel. A trace records only the outer op, which has
no policy, and AOTAutograd calls that op with autocast off.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from amp_fx.devices.low_dtypes import has_product_kernels
from amp_fx.dtypes import is_low
from amp_fx.graphs.casts import is_cacheable
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.values import tensors_in
from amp_fx.policies.calls import qualified_name
from amp_fx.tables.mixtures import accepts, mixture_of
from amp_fx.torch_private.kernels import (
    addmm_activation,
    masked_softmax,
    native_multi_head_attention,
)
from amp_fx.torch_private.ops import DispatchKey, OpOverload
from amp_fx.torch_private.recurrent import lstm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import fx

    from amp_fx.policies.calls import Call

_aten = torch.ops.aten


def transformer_encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """Traceable version of ``aten::_transformer_encoder_layer_fwd``.

    ``torch.nn.TransformerEncoderLayer`` calls the op in evaluation mode. ``src`` has the shape
    (batch, sequence, ``embed_dim``) and is not nested. Calls the same ops as
    ``transformer_encoder_layer_forward`` in ``ATen/native/transformers/transformer.cpp``.
    """
    if src.numel() == 0:
        return src.clone()

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.layer_norm(x, [embed_dim], weight, bias, eps)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    x = native_multi_head_attention(
        x,
        x,
        x,
        embed_dim,
        num_heads,
        qkv_weight,
        qkv_bias,
        proj_weight,
        proj_bias,
        mask=mask,
        need_weights=False,
        average_attn_weights=True,
        mask_type=mask_type,
    )[0]
    # The C++ code adds in place, in the dtype of the product.
    x = _add_in_place(x, src)
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    residual = x
    if norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    rows = x.view(x.size(0) * x.size(1), x.size(2))
    rows = addmm_activation(ffn_bias_1, rows, ffn_weight_1.t(), use_gelu=use_gelu)
    rows = torch.addmm(ffn_bias_2, rows, ffn_weight_2.t())
    x = _add_in_place(rows.view(x.size(0), x.size(1), -1), residual)
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)


def self_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,  # noqa: ARG001, of weights that nobody needs
    mask_type: int | None = None,
) -> Any:
    """Version of ``aten::_native_multi_head_attention`` with products that inductor can choose.

    Adds biases and scales before it rounds, which the kernel does afterwards, and attends without
    a mask by ``scaled_dot_product_attention``.

    Returns:
        ``(batch, sequence, embed_dim)`` and None; ``NotImplemented`` for anything else than
        self-attention whose weights are not needed.
    """
    # One product with all three weights needs one input.
    if need_weights or not (query is key and key is value):
        return NotImplemented
    batch, length, _ = query.shape
    width = embed_dim // num_head
    qkv = linear(query, qkv_weight, qkv_bias).view(batch, length, 3, num_head, width)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    if mask is None:
        x = scaled_dot_product_attention(q, k, v)
    else:
        scores = (q * width**-0.5) @ k.transpose(-2, -1)
        x = masked_softmax(scores, mask.bool(), scores.dim() - 1, mask_type) @ v
    x = x.transpose(1, 2).reshape(query.shape)
    return linear(x, proj_weight, proj_bias), None


def activated_product(
    bias: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    use_gelu: bool = False,
) -> torch.Tensor:
    """Version of ``aten::_addmm_activation`` with a product that inductor can choose."""
    product = torch.addmm(bias, rows, weight, beta=beta, alpha=alpha)
    return gelu(product) if use_gelu else torch.relu(product)


def _add_in_place(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the result of ``x.add_(other)``, which has the dtype of ``x``."""
    return torch.add(x, other).to(x.dtype)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    _aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer
}
"""Traceable versions by op. Their arguments must not require gradients."""


def normal(
    mean: torch.Tensor, std: torch.Tensor, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Version of ``aten::normal.Tensor_Tensor`` for a mean of a lower dtype than ``std``.

    The kernel returns the dtype of the mean, unlike its fake kernel. Calls the same ops as
    ``normal_impl`` in ``ATen/native/DistributionTemplates.h``.
    """
    shape = torch.broadcast_shapes(mean.shape, std.shape)  # type: ignore[no-untyped-call]
    samples = torch.empty(shape, dtype=mean.dtype, device=mean.device)
    samples.normal_(generator=generator).mul_(std.detach()).add_(mean.detach())
    # The gradients of both arguments are zero, not None.
    never = torch.zeros((), dtype=torch.bool, device=mean.device)
    return torch.where(never, torch.where(never, mean, std.to(mean.dtype)), samples)


def addr(
    x: torch.Tensor, vec1: torch.Tensor, vec2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Version of ``aten::addr`` for a matrix without dimensions and vectors of a lower dtype.

    The kernel returns the dtype of the matrix. Its fake kernel ignores tensors without dimensions.
    """
    dtype = torch.promote_types(x.dtype, torch.promote_types(vec1.dtype, vec2.dtype))
    return torch.addr(x.to(dtype), vec1.to(dtype), vec2.to(dtype), beta=beta, alpha=alpha)


CORRECTED: Mapping[Any, Callable[..., Any]] = {
    _aten.normal.Tensor_Tensor: normal,
    _aten.addr.default: addr,
}
"""Versions of ops whose kernels return another dtype for a mixture than their fake kernels promise.

``tests/tables/test_mixtures.py`` finds such ops.
"""


def corrected_version(op: OpOverload, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Returns a traceable version of a call; None if the op's fake kernel is right."""
    if op not in CORRECTED:
        return None
    mixture = mixture_of(tensor.dtype for tensor in tensors_in(args))
    if mixture is None or "?" in mixture:
        return None
    if accepts(qualified_name(op), mixture, needs_all_results=True):
        return None
    return CORRECTED[op]


def lstm_version(args: tuple[Any, ...], low_dtype: torch.dtype | None) -> Callable[..., Any] | None:
    """Returns a traceable version of ``aten::lstm.input``; None if its kernel is used.

    On CPUs, the op calls ``mkldnn_rnn_layer``. AOTAutograd cannot save what its backward needs, and
    oneDNN only has it for dtypes for which the CPU has units.

    Args:
        args: The arguments of the op.
        low_dtype: The low dtype of the CPU; None if autocast is off there.
    """
    hidden, cells = args[1]
    has_projections = hidden.size(2) != cells.size(2)  # which oneDNN lacks
    if low_dtype is None or has_projections or hidden.device.type != "cpu":
        return None
    has_backward = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args))
    has_units = has_product_kernels(low_dtype) is not False
    if has_units and not has_backward:
        return None  # the kernel computes all steps of a sequence in one call
    # Eager code calls oneDNN for these inputs, under autocast with all arguments in low precision.
    is_fused = torch.backends.mkldnn.enabled and (has_units or args[0].dtype is torch.float32)
    return functools.partial(lstm, dtype=low_dtype if is_fused else None)


_WITH_PRODUCTS: Mapping[Any, Callable[..., Any]] = {
    _aten._native_multi_head_attention.default: self_attention,
    _aten._addmm_activation.default: activated_product,
}
"""Versions of kernels by op, for generated code that may round at other points."""


def decompose_products(gm: fx.GraphModule) -> None:
    """Replaces low-precision kernels on the CPU by their products, in a rewritten graph.

    The weights of these products can be packed, and CPUs without units for their dtype compute
    them in float32. The results have other bits than the kernels.
    """
    for op in _WITH_PRODUCTS:
        for node in gm.graph.find_nodes(op="call_function", target=op):
            value = VALUE.of(node.all_input_nodes[0])
            if is_low(value.dtype) and value.device.type == "cpu":
                # The op remains an argument, and is called for what ``_with_products`` leaves to
                # it.
                node.args = (op, *node.args)
                node.target = _with_products
    gm.recompile()


def _with_products(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    result = _WITH_PRODUCTS[op](*args, **kwargs)
    return op(*args, **kwargs) if result is NotImplemented else result


def is_flattened(args: tuple[Any, ...], call: Call) -> bool:
    """Returns True if eager autocast flattens a product only because a weight requires gradients.

    Its cached copy of a weight requires gradients also while none are recorded, and a product of a
    batch with a matrix or vector that requires gradients is flattened (``should_fold`` in
    ``ATen/native/LinearAlgebra.cpp``). Others are only flattened if that needs no copy.

    Args:
        args: The arguments of the product.
        call: The product with its casts.
    """
    # While gradients are recorded, the cast requires gradients in a trace as well, and AOTAutograd
    # flattens the product like eager code.
    if torch.is_grad_enabled() or call[0] not in (_aten.linear.default, _aten.matmul.default):
        return False
    dims = [argument.dim() for argument in args[:2]]
    larger, smaller = dims.index(max(dims)), dims.index(min(dims))
    given, copy = args[smaller], call[1][smaller]
    is_batched = dims[larger] >= 3 and dims[smaller] <= 2
    needs_copy = smaller == 0 or not _has_even_rows(call[1][larger])
    is_cached = copy is not given and given.requires_grad and is_cacheable(given)
    return is_batched and needs_copy and is_cached


def _has_even_rows(batch: torch.Tensor) -> bool:
    """Returns True if a view of all rows as one matrix exists."""
    sizes, strides = batch.shape, batch.stride()
    is_even = all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(batch.dim() - 2))
    return is_even or batch.is_contiguous()


def flattened_product(call: Call) -> torch.Tensor:
    """Traceable version of ``aten::matmul`` and ``aten::linear`` if ``is_flattened``."""
    op, args, kwargs = call

    def product(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = y.t() if op is _aten.linear.default else y
        # Like eager's cached copy of the weight. ``should_fold`` reads this flag.
        (x if x.dim() < y.dim() else y).requires_grad_()
        key = DispatchKey.CompositeImplicitAutograd
        out: torch.Tensor = _aten.matmul.default._op_dk(key, x, y)
        return out if bias is None else out + bias

    return product(*args, **kwargs)


def has_decomposition(node: fx.Node) -> bool:
    """Returns True if a captured node calls an op of ``DECOMPOSITIONS``."""
    name = getattr(node.target, "__name__", "")
    return any(op._schema.name == f"aten::{name}" for op in DECOMPOSITIONS)
