"""Models that no pass was written for: experts, state spaces, diffusion, speech, ranking."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.models.blocks import Attention, Block, RMSNorm


class Experts(nn.Module):
    """A layer of experts as Mixtral has it: the best two for each token, as batched products.

    Args:
        width: Of its input.
        inner: Of the experts' inner layers.
        count: How many experts there are; each takes as many tokens.
    """

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.norm = RMSNorm(width)
        self.router = nn.Linear(width, count, bias=False)
        self.gate, self.up = (nn.Parameter(torch.zeros(count, width, inner)) for _ in range(2))
        self.down = nn.Parameter(torch.zeros(count, inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream after the layer."""
        rows = self.norm(x).flatten(0, -2)
        shares = functional.softmax(self.router(rows), -1, dtype=torch.float)
        share, chosen = torch.topk(shares, 2, -1)
        share = (share / share.sum(-1, keepdim=True)).to(rows.dtype).flatten()
        order = torch.argsort(chosen.flatten(), stable=True)
        sorted_rows = rows[order // 2].view(self.count, -1, rows.shape[1])
        gated = functional.silu(torch.bmm(sorted_rows, self.gate)) * torch.bmm(sorted_rows, self.up)
        made = torch.bmm(gated, self.down).flatten(0, 1) * share[order, None]
        out = torch.zeros_like(rows).index_add_(0, order // 2, made.to(rows.dtype))
        return x + out.view_as(x)


class DiffusionBlock(nn.Module):
    """The block of a diffusion Transformer (DiT): norms that a condition scales and shifts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2)
        )
        self.attention = Attention(width, heads, is_causal=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream after the block; its mean is also the condition."""
        parts = self.condition(functional.silu(x.mean(1))).unsqueeze(1).chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        inner = functional.gelu(self.up(self.norm2(x) * (1 + scale2) + shift2), approximate="tanh")
        out: torch.Tensor = x + gate2 * self.down(inner)
        return out


class StateSpace(nn.Module):
    """Mamba2's layer in its chunked form: sums of logarithms, exponentials, products of four.

    Args:
        width: Of its input; twice as wide inside.
        heads: How many heads it has.
        states: How many states each head has.
        chunk: Tokens that are multiplied at once; divides their number.
    """

    def __init__(self, width: int, heads: int, states: int, chunk: int = 64) -> None:
        super().__init__()
        self.heads, self.states, self.chunk, self.inner = heads, states, chunk, 2 * width
        mixed = self.inner + 2 * states
        self.norm = RMSNorm(width)
        self.into = nn.Linear(width, self.inner + mixed + heads, bias=False)
        self.out = nn.Linear(self.inner, width, bias=False)
        self.conv = nn.Conv1d(mixed, mixed, 4, padding=3, groups=mixed)
        self.log_decay, self.step, self.skip = (nn.Parameter(torch.zeros(heads)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream after the layer."""
        batch, tokens, _ = x.shape
        widths = [self.inner, self.inner + 2 * self.states, self.heads]
        gate, mixed, step = torch.split(self.into(self.norm(x)), widths, -1)
        mixed = self.conv(mixed.transpose(1, 2))[..., :tokens].transpose(1, 2)
        widths = [self.inner, self.states, self.states]
        value, key, query = torch.split(functional.silu(mixed), widths, -1)
        step = functional.softplus(step + self.step)
        value = value.reshape(batch, tokens, self.heads, -1)
        y = self._scan(value * step[..., None], -torch.exp(self.log_decay) * step, key, query)
        y = y + value * self.skip[:, None]
        out: torch.Tensor = x + self.out(y.flatten(2) * functional.silu(gate))
        return out

    def _scan(
        self, value: torch.Tensor, decay: torch.Tensor, key: torch.Tensor, query: torch.Tensor
    ) -> torch.Tensor:
        """Returns what each token reads from the states of its chunk and of earlier chunks."""
        batch, tokens, heads, _ = value.shape
        chunks = (batch, tokens // self.chunk, self.chunk)
        value, key, query = (t.reshape(*chunks, *t.shape[2:]) for t in (value, key, query))
        sums = decay.view(*chunks, heads).permute(0, 3, 1, 2).cumsum(-1)
        inside = torch.einsum(
            "bkln,bksn,bhkls,bkshp->bklhp", query, key, _differences(sums).exp(), value
        )
        left = torch.einsum("bkln,bhkl,bklhp->bkhpn", key, torch.exp(sums[..., -1:] - sums), value)
        totals = functional.pad(sums[..., -1], (1, 0)).cumsum(-1)
        left = torch.cat([torch.zeros_like(left[:, :1]), left], 1)
        before = torch.einsum("bhzc,bchpn->bzhpn", _differences(totals).exp(), left)[:, :-1]
        outside = torch.einsum("bkln,bkhpn,bhkl->bklhp", query, before, sums.exp())
        return (inside + outside).reshape(batch, tokens, heads, -1)


def _differences(sums: torch.Tensor) -> torch.Tensor:
    """Subtracts every earlier sum from every sum; entries of later sums are far below zero."""
    later = torch.ones(sums.shape[-1], sums.shape[-1], device=sums.device, dtype=torch.bool).triu(1)
    return (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -1e4)


class Speech(nn.Module):
    """Whisper: convolutions over sound, an encoder and a decoder layer, attention between them."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.conv1 = nn.Conv1d(80, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.encoder = Block(width, heads, is_causal=False)
        self.decoder = Block(width, heads, is_causal=True)
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.tokens = nn.Parameter(torch.zeros(tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the decoder's residual stream."""
        x = functional.gelu(self.conv2(functional.gelu(self.conv1(x)))).transpose(1, 2)
        x = self.encoder(x)
        y = self.tokens.expand(x.shape[0], *self.tokens.shape) + 0 * x[:, :1]
        pairs = ((self.q, self.norm(y)), (self.k, x), (self.v, x))
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer, h in pairs)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out: torch.Tensor = self.decoder(y + self.out(mixed.reshape(y.shape)))
        return out


class Recommender(nn.Module):
    """DLRM: tables for categories, products between all of them, layers below and above.

    Args:
        words: Rows of each of 26 tables.
        width: Of what the tables hold.
        inner: Of the layers.
    """

    def __init__(self, words: int, width: int, inner: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(words, width) for _ in range(26))
        self.below = nn.Sequential(
            nn.Linear(13, inner), nn.ReLU(), nn.Linear(inner, width), nn.ReLU()
        )
        self.above = nn.Sequential(
            nn.Linear(27 * 27 + width, inner),
            nn.ReLU(),
            nn.Linear(inner, inner),
            nn.ReLU(),
            nn.Linear(inner, 1),
        )

    def forward(self, x: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Returns a logit for each row: of 13 numbers, the first of 26, and 26 categories."""
        dense = self.below(x[:, :13, 0])
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        found = torch.stack([dense, *looked_up], 1)
        between = torch.bmm(found, found.transpose(1, 2)).flatten(1)
        out: torch.Tensor = self.above(torch.cat([dense, between], 1))
        return out


class Standardized(nn.Module):
    """A convolution whose weight is standardised in each call, as BiT's are."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, channels, 3, 3))
        self.gain = nn.Parameter(torch.ones(channels, 1, 1, 1))
        self.mix = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the images after the layer."""
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
        weight = (self.weight - mean) * torch.rsqrt(variance + 1e-5) * self.gain
        inner = functional.silu(functional.conv2d(x, weight, padding=1))
        out: torch.Tensor = x + self.mix(inner)
        return out
