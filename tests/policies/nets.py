"""A small decoder in plain modules, for policies that name them."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 8


class Scores(nn.Module):
    """Attention weights of queries and keys."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1)


class Attention(nn.Module):
    """One head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.scores = Scores()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mixed: torch.Tensor = self.scores(q, k) @ v
        return mixed


class Block(nn.Module):
    """Attention behind a normalization, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.attn(self.norm(x))
        return x + change


class Decoder(nn.Module):
    """Two blocks between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def in_float32(module: nn.Module) -> None:
    """Makes a module run in float32 in eager autocast, as a careful author would write it."""
    forward = module.forward

    def full(*args: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            result: torch.Tensor = forward(*(arg.float() for arg in args))
            return result

    module.forward = full
