"""Serves a decoder token by token with a KV cache of fixed size, where cached weights pay most.

    python serve_kv_cache.py --width 768 --layers 12 --tokens 64

Every weight is cast once, not once for each token; `amp_fx.weight_cache.stats()` shows it.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import amp_fx


class Layer(nn.Module):
    """One layer of a decoder that looks at a cache of the keys and values so far."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """One token [batch, 1, width]; writes to the cache [2, batch, heads, length, width]."""
        batch, _, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, 1, 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in qkv)
        cache[0].index_copy_(2, place, k.to(cache.dtype))
        cache[1].index_copy_(2, place, v.to(cache.dtype))
        seen = (torch.arange(cache.shape[3], device=x.device) <= place)[None, None, None]
        y = nn.functional.scaled_dot_product_attention(q, cache[0].to(q), cache[1].to(q), seen)
        x = x + self.out(y.transpose(1, 2).reshape(batch, 1, width))
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return result


class Decoder(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(layers))

    def forward(
        self, ids: torch.Tensor, caches: list[torch.Tensor], place: torch.Tensor
    ) -> torch.Tensor:
        """The next token [batch, 1] after one token."""
        x = self.embed(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, place)
        result: torch.Tensor = self.head(x).argmax(-1)
        return result


def generate(step: Decoder, args: argparse.Namespace) -> torch.Tensor:
    """Tokens, greedily, from the first one on."""
    size = (2, 1, 4, args.tokens, args.width // 4)
    caches = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(args.layers)]
    ids = [torch.zeros(1, 1, dtype=torch.long)]
    for place in range(args.tokens - 1):
        ids.append(step(ids[-1], caches, torch.tensor([place])))
    return torch.cat(ids, 1)


@torch.no_grad()
def main() -> None:
    """Generates with and without the compiled step, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Decoder(args.width, args.layers, 1000).eval()
    step = amp_fx.compile(model, dtype=torch.bfloat16, dynamic=False)
    generate(step, args)  # compiles
    start = time.perf_counter()
    tokens = generate(step, args)
    seconds = time.perf_counter() - start
    stats = amp_fx.weight_cache.stats()
    print(f"{args.tokens / seconds:.0f} tokens a second")
    print(stats)
    assert stats.entries >= 4 * args.layers, stats
    with torch.autocast("cpu", torch.bfloat16):
        expected = generate(model, args)
    same = (tokens == expected).float().mean().item()
    print(f"{same:.0%} of the tokens are those of eager autocast")


if __name__ == "__main__":
    main()
