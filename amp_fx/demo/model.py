"""A small GPT: pre-norm decoder blocks, learned positions, tied embeddings."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a model is; the defaults train in a minute on two cores."""

    width: int = 64
    depth: int = 2
    heads: int = 4
    context: int = 64


class Block(nn.Module):
    """Causal self-attention, then a perceptron, each added to what came in."""

    def __init__(self, size: Size) -> None:
        """A block with random weights."""
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``(batch, context, width)`` to the same shape."""
        x = x + self.attention_out(self._attend(self.attention_norm(x)))
        change: torch.Tensor = self.mlp(x)
        return x + change

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """Predicts the next token; the forward pass returns the loss."""

    def __init__(self, num_tokens: int, size: Size) -> None:
        """A model with random weights."""
        super().__init__()
        self.token = nn.Embedding(num_tokens, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        # The embedding is the output layer too: at this scale the first logits are about 1.
        nn.init.normal_(self.token.weight, std=size.width**-0.5)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy, in nats per token, of ``(batch, context)`` tokens."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        logits = nn.functional.linear(self.norm(self.blocks(x)), self.token.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
