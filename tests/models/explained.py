"""Models that explanations and pictures are tested with."""

from __future__ import annotations

import torch
from torch import nn

from amp_fx.demo.models import GPT, Size


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
