"""Transformers and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from tests.models.explained import GPT, Size
from tests.parity.cases import case, leaf
from tests.parity.oracle import Subject

if TYPE_CHECKING:
    from tests.parity.oracle import Program


@case()
def transformer_encoder() -> Subject:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return Subject(nn.TransformerEncoder(layer, 2), (leaf(2, 8, 32),))


@case()
def transformer_encoder_norm_first() -> Subject:
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
    )
    return Subject(nn.TransformerEncoder(layer, 2), (leaf(2, 8, 32),))


@case()
def transformer_encoder_eval() -> Subject:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()

    def drive(program: Program, x: Tensor) -> Any:
        with torch.no_grad():
            return program(x)

    return Subject(model, (torch.randn(2, 8, 32),), drive=drive)


@case()
def transformer_with_masks() -> Subject:
    model = nn.Transformer(32, 4, 1, 1, 64, dropout=0.1, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.tensor([[False] * 5 + [True] * 3, [False] * 8])

    def forward(source: Tensor, target: Tensor, mask: Tensor, padding: Tensor) -> Any:
        return model(
            source,
            target,
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )

    return Subject(forward, (leaf(2, 8, 32), leaf(2, 6, 32), mask, padding), module=model)


class Decoder(GPT):
    """A decoder-only language model with tied embeddings and its loss."""

    def __init__(self) -> None:
        super().__init__(50, Size(width=32, depth=2, heads=4, context=16))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return logits, loss


@case()
def decoder_only_with_tied_weights_and_loss() -> Subject:
    return Subject(Decoder(), (torch.randint(50, (2, 12)),))


@case()
def multihead_attention() -> Subject:
    model = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
    padding = torch.tensor([[False] * 6 + [True] * 2, [False] * 8])

    def forward(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Any:
        return model(q, k, v, key_padding_mask=padding, need_weights=True)

    return Subject(forward, (leaf(2, 4, 32), leaf(2, 8, 32), leaf(2, 8, 32), padding), module=model)


@case()
def attention_written_out() -> Subject:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)

    return Subject(forward, (leaf(2, 6, 4, 8), leaf(2, 6, 4, 8), leaf(2, 6, 4, 8)))


@case()
def attention_with_float_mask_and_dropout() -> Subject:
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.2)

    args = (leaf(2, 4, 6, 8), leaf(2, 4, 6, 8), leaf(2, 4, 6, 8), torch.randn(6, 6))
    return Subject(forward, args)


@case()
def flex_attention_in_eval() -> Subject:
    project = nn.Linear(32, 96)

    def causal(score: Tensor, _b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(q >= k, score, -float("inf"))

    def forward(x: Tensor) -> Any:
        q, k, v = project(x).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, score_mod=causal)

    def drive(program: Program, x: Tensor) -> Any:
        with torch.no_grad():
            return program(x)

    return Subject(forward, (torch.randn(2, 8, 32),), module=project, drive=drive)
