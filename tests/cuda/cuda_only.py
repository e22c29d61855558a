"""Ops that CUDA has kernels of and the CPU has none, or has others of; all of them on the host."""

from __future__ import annotations

from typing import Any

import torch

aten: Any = torch.ops.aten
Tensor = torch.Tensor

OF_METADATA = frozenset(
    {
        "aten::set_",
        "aten::set_.source_Storage",
        "aten::set_.source_Storage_storage_offset",
        "aten::set_.source_Tensor",
    }
)
"""Ops whose kernels for CUDA touch no bytes, besides those that make views."""

LEFT = frozenset(
    {*OF_METADATA, "aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"}
)
"""Ops whose kernels for CUDA stay: those, and kernels that call other ops, which autocast casts."""

COMPOSED = (
    "aten::copy_",
    "aten::convolution",
    "aten::convolution_backward",
    "aten::convolution_overrideable",
    "aten::convolution_backward_overrideable",
)
"""Ops that are made of others on CUDA, by functions that ask for the device."""


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,  # noqa: ARG001
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``_scaled_dot_product_flash_attention`` without dropout; results lie as CUDA's."""
    cpu = aten._scaled_dot_product_flash_attention_for_cpu
    out, sums = cpu(q, k, v, dropout_p, is_causal, scale=scale)
    seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    none = torch.empty(0, dtype=q.dtype)
    sizes = q.shape[2], k.shape[2]
    return as_flash(out), sums.contiguous(), None, None, *sizes, seed, offset, none


def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """``_scaled_dot_product_flash_attention_backward`` without dropout."""
    dropout_p, is_causal = rest[4:6]
    cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = cpu(grad, q, k, v, out, sums, dropout_p, is_causal, scale=scale)
    return tuple(map(as_flash, grads))


def as_flash(tensor: Tensor) -> Tensor:
    """The tensor with batch, length, heads and width in this order in memory."""
    made = torch.empty_permuted(tensor.shape, (0, 2, 1, 3), dtype=tensor.dtype)
    return made.copy_(tensor)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention on CUDA: flash where it can be, else written out.

    CUDA's memory-efficient kernels, which take masks and float32, are not emulated.
    """
    sizes = {q.shape[-1], k.shape[-1], v.shape[-1]}
    is_plain = attn_mask is None and dropout_p == 0.0 and not enable_gqa and q.dim() == 4
    if is_plain and q.dtype in (torch.float16, torch.bfloat16) and len(sizes) == 1:
        flash = aten._scaled_dot_product_flash_attention
        out: Tensor = flash(q, k, v, 0.0, is_causal, False, scale=scale)[0]
        return out
    options = {"scale": scale, "enable_gqa": enable_gqa}
    math = aten._scaled_dot_product_attention_math
    return math(q, k, v, attn_mask, dropout_p, is_causal, **options)[0]  # type: ignore[no-any-return]


def with_dtype(op: Any) -> Any:
    """A product that gives another dtype than its inputs have, as its sums are before rounding.

    CUDA's kernels refuse matrices of two dtypes (``ATen/native/cuda/Blas.cpp``).
    """

    def product(*args: Any, **kwargs: Any) -> Any:
        *inputs, dtype = args
        if inputs[-2].dtype != inputs[-1].dtype:
            raise RuntimeError("input dtypes must be the same")
        given = [x.to(dtype) if isinstance(x, Tensor) else x for x in inputs]
        return op(*given, **kwargs)

    return product


def lstm_cell(
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``_thnn_fused_lstm_cell``: in float32, rounded at the end."""
    summed = _summed(gates, hidden, bias, hidden_bias)
    i, f, g, o = summed.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new_cell = f * cell.float() + i * g
    found = o * new_cell.tanh(), new_cell, torch.cat([i, f, g, o], 1)
    return tuple(x.to(gates.dtype) for x in found)  # type: ignore[return-value]


def lstm_cell_backward(
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
    cell: Tensor,
    new_cell: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``_thnn_fused_lstm_cell_backward_impl``."""
    i, f, g, o = workspace.float().chunk(4, 1)
    tanh = new_cell.float().tanh()
    into_hidden = torch.zeros_like(tanh) if grad_hidden is None else grad_hidden.float()
    into_cell = into_hidden * o * (1 - tanh * tanh)
    if grad_cell is not None:
        into_cell = into_cell + grad_cell.float()
    parts = (
        into_cell * g * (1 - i) * i,
        into_cell * cell.float() * (1 - f) * f,
        into_cell * i * (1 - g * g),
        into_hidden * tanh * (1 - o) * o,
    )
    grad_gates = torch.cat(parts, 1).to(workspace.dtype)
    grad_bias = grad_gates.sum(0) if has_bias else torch.empty(0, dtype=workspace.dtype)
    return grad_gates, (into_cell * f).to(workspace.dtype), grad_bias


def gru_cell(
    gates: Tensor,
    hidden_gates: Tensor,
    hidden: Tensor,
    bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``_thnn_fused_gru_cell``: in float32, rounded at the end."""
    r, z, n = _summed(gates, bias).chunk(3, 1)
    hr, hz, hn = _summed(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (r + hr).sigmoid(), (z + hz).sigmoid()
    new = (n + reset * hn).tanh()
    old = hidden.float()
    workspace = torch.cat([reset, update, new, old, hn], 1)
    return (new + update * (old - new)).to(gates.dtype), workspace.to(gates.dtype)


def gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    """``_thnn_fused_gru_cell_backward``."""
    reset, update, new, old, hn = workspace.float().chunk(5, 1)
    into = grad.float()
    into_new = into * (1 - update) * (1 - new * new)
    into_update = into * (old - new) * (1 - update) * update
    into_reset = into_new * hn * (1 - reset) * reset
    dtype = workspace.dtype
    grads = (
        torch.cat([into_reset, into_update, into_new], 1).to(dtype),
        torch.cat([into_reset, into_update, into_new * reset], 1).to(dtype),
    )
    none = torch.empty(0, dtype=dtype)
    biases = tuple(g.sum(0) for g in grads) if has_bias else (none, none)
    return *grads, (into * update).to(dtype), *biases


def float_of_half(op: Any) -> Any:
    """``_softmax`` and ``_log_softmax``, which give float32 of float16 on CUDA alone."""

    def forward(x: Tensor, dim: int, half_to_float: bool) -> Any:
        return op(x.float() if half_to_float else x, dim, False)

    return forward


def half_of_float(op: Any) -> Any:
    """Their backwards, which give float16 again."""

    def backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Any:
        return op(grad, out, dim, grad.dtype).to(dtype)

    return backward


def _summed(*terms: Tensor | None) -> Tensor:
    found = [term.float() for term in terms if term is not None]
    total = found[0]
    for term in found[1:]:
        total = total + term
    return total


REPLACED: dict[Any, Any] = {
    aten._log_softmax.default: float_of_half(aten._log_softmax),
    aten._log_softmax_backward_data.default: half_of_float(aten._log_softmax_backward_data),
    aten._scaled_dot_product_flash_attention.default: flash_attention,
    aten._scaled_dot_product_flash_attention_backward.default: flash_attention_backward,
    aten._softmax.default: float_of_half(aten._softmax),
    aten._softmax_backward_data.default: half_of_float(aten._softmax_backward_data),
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
    aten._use_cudnn_ctc_loss.default: lambda *_, **__: False,
    aten._use_cudnn_ctc_loss.Tensor: lambda *_, **__: False,
    aten._use_miopen_ctc_loss.default: lambda *_, **__: False,
    aten._use_miopen_ctc_loss.Tensor: lambda *_, **__: False,
    aten.addmm.dtype: with_dtype(aten.addmm.default),
    aten.baddbmm.dtype: with_dtype(aten.baddbmm.default),
    aten.bmm.dtype: with_dtype(aten.bmm.default),
    aten.bmm.dtype_out: with_dtype(aten.bmm.out),
    aten.mm.dtype: with_dtype(aten.mm.default),
    aten.mm.dtype_out: with_dtype(aten.mm.out),
    aten.record_stream.default: lambda *_: None,
}
"""By op of CUDA's, what computes it on the host."""


_KEYS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)


def computed_by(op: Any) -> Any:
    """Returns the function that computes a CUDA op on the host.

    It is a function of ``REPLACED``, the CPU's kernel, or torch's decomposition.

    Relies on ``torch._decomp.decomposition_table``.
    """
    if op in REPLACED:
        return REPLACED[op]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(has_kernel(op.name(), key) for key in _KEYS):
        return op
    from torch._decomp import decomposition_table

    return decomposition_table.get(op, op)


NO_LOW_KERNEL = (
    "not implemented for 'Half'",
    "not implemented for 'BFloat16'",
    "MKL FFT doesn't support tensors of type",
    "mixed dtype (CPU)",
)
"""In the messages of the CPU's kernels that CUDA has for low dtypes."""


def lacks_low_kernel(error: Exception) -> bool:
    """Returns True if an op failed because the CPU has no kernel of it for low inputs."""
    return any(words in str(error) for words in NO_LOW_KERNEL)
