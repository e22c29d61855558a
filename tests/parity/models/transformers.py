"""Transformers and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

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


class Block(nn.Module):
    """A causal decoder block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Decoder(nn.Module):
    """A decoder-only language model with tied embeddings and its loss."""

    def __init__(self, vocabulary: int = 50, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
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
