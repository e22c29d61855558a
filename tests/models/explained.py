"""Models that explanations, pictures and parity are tested with."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a Transformer."""

    width: int
    depth: int
    heads: int
    context: int


class Block(nn.Module):
    """Pre-norm Transformer block: self-attention and a perceptron, with residual connections."""

    def __init__(self, size: Size) -> None:
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
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """Decoder like GPT-2, with learned positions and tied embeddings."""

    def __init__(self, num_tokens: int, size: Size) -> None:
        """Creates a model for up to ``size.context`` positions."""
        super().__init__()
        self.token = nn.Embedding(num_tokens, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        # The embedding is also the output layer: with this scale, initial logits are about 1.
        nn.init.normal_(self.token.weight, std=size.width**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps tokens ``(batch, context)`` to logits ``(batch, context, num_tokens)``."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)]
        weights = (heads[0] @ heads[1].transpose(-2, -1) / 4).softmax(-1)
        result: torch.Tensor = self.out((weights @ heads[2]).transpose(1, 2).flatten(2))
        return result


class DoubleConv(nn.Sequential):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(DoubleConv(*sizes) for sizes in ((3, 8), (8, 16)))
        self.pool = nn.MaxPool2d(2)
        self.middle = DoubleConv(16, 32)
        self.up = nn.ModuleList(nn.ConvTranspose2d(*sizes, 2, 2) for sizes in ((32, 16), (16, 8)))
        self.merge = nn.ModuleList(DoubleConv(*sizes) for sizes in ((32, 16), (16, 8)))
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skipped), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        result: torch.Tensor = self.head(x)
        return result


class LanguageModel(GPT):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(tokens)
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(depth: int = 2) -> nn.Module:
    return LanguageModel(50, Size(width=32, depth=depth, heads=4, context=16))


CASES = {
    "mlp": (mlp, (torch.randn(8, 16),)),
    "attention": (Attention, (torch.randn(2, 10, 64),)),
    "unet": (UNet, (torch.randn(1, 3, 16, 16),)),
    "gpt": (gpt, (torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long))),
}
