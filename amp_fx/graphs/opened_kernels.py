"""Traceable Python versions of kernels that call other ops.

Eager autocast casts for the ops inside such a kernel. A trace records only the outer op, which has
no policy, and AOTAutograd calls that op with autocast off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_fx.torch_private.kernels import addmm_activation, native_multi_head_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import fx


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


def _add_in_place(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the result of ``x.add_(other)``, which has the dtype of ``x``."""
    return torch.add(x, other).to(x.dtype)


OPENED: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer
}
"""Traceable versions by op. Their arguments must not require gradients."""


def is_opened(node: fx.Node) -> bool:
    """Returns True if a captured node calls an op of ``OPENED``."""
    name = getattr(node.target, "__name__", "")
    return any(op._schema.name == f"aten::{name}" for op in OPENED)
