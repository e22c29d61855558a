"""Trains a small GPT on text that repeats, in mixed precision: the loop people start from.

python train_gpt.py --steps 200 --width 128
"""

from __future__ import annotations

import argparse
import contextlib

import torch
from torch import nn

from amp_fx.integrations import compile_blocks


class Block(nn.Module):
    """Attention and a perceptron, each with its norm first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states of shape [batch, length, width], in and out."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in qkv)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of shape [batch, length, 256] for ids of shape [batch, length]."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def main() -> list[float]:
    """Trains; returns the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--no-amp", action="store_true", help="train in float32")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 200), device=device)

    model = GPT(args.width, args.layers, args.length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compile_blocks(model)
    losses = []
    for step in range(args.steps):
        starts = torch.randint(len(text) - args.length - 1, (args.batch,))
        rows = torch.stack([text[i : i + args.length + 1] for i in starts.tolist()])
        region = contextlib.nullcontext() if args.no_amp else torch.autocast(device, torch.bfloat16)
        with region:
            logits = model(rows[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    found = main()
    assert found[-1] < found[0], found
