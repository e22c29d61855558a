"""Makes the pictures of the documentation: ``python docs/pictures.py``; wants Graphviz."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import amp_fx

ASSETS = Path(__file__).resolve().parent / "assets"


class Attention(nn.Module):
    """A small attention, as in the guide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of shape [length, width], in and out."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        result: torch.Tensor = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return result


def main() -> None:
    """Writes all of them into ``docs/assets``."""
    with torch.no_grad():
        attention = amp_fx.explain(Attention(16))(torch.randn(8, 16))
    amp_fx.draw(attention, ASSETS / "attention.svg", depth=9)


if __name__ == "__main__":
    main()
