"""Blocks of models that people train and serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable


class MLP(nn.Module):
    """Two wide linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output for a batch of rows."""
        out: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Attention(nn.Module):
    """Self-attention with one product for queries, keys and values, as GPT-2 and ViT have it."""

    def __init__(self, width: int, heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output for rows of tokens."""
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out


class Block(nn.Module):
    """A Transformer block with the norm first: GPT-2's if it is causal, else ViT's."""

    def __init__(self, width: int, heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, is_causal=is_causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.approximate = "tanh" if is_causal else "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream after the block."""
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.down(
            functional.gelu(self.up(self.norm2(x)), approximate=self.approximate)
        )
        return out


class RMSNorm(nn.Module):
    """RMSNorm of Llama in ``transformers``, which casts to float32 itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalized input, in its dtype."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class T5Norm(nn.Module):
    """As T5 in ``transformers`` has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalized input; low if the weight is."""
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


class GatedBlock(nn.Module):
    """Base of the blocks of Llama and T5: separate projections, and a gated feed-forward part."""

    def __init__(self, width: int, heads: int, inner: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = norm(width), norm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def heads_of(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, by head."""
        batch, tokens, _ = x.shape
        normed = self.norm1(x)
        return [
            layer(normed).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        ]

    def after_attention(
        self, x: torch.Tensor, mixed: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the residual stream after the block."""
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        normed = self.norm2(x)
        out: torch.Tensor = x + self.down(act(self.gate(normed)) * self.up(normed))
        return out


class LlamaBlock(GatedBlock):
    """RMSNorm, rotary positions, SiLU."""

    inverse: torch.Tensor

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__(width, heads, inner, RMSNorm)
        steps = torch.arange(0, width // heads, 2).float()
        self.register_buffer("inverse", 1 / (10000 ** (steps / (width // heads))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream after the block."""
        q, k, v = self.heads_of(x)
        with torch.autocast(x.device.type, enabled=False):
            positions = torch.arange(x.shape[1], device=x.device).float()
            angles = positions[:, None] * self.inverse[None]
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = q * cos + _rotated(q) * sin, k * cos + _rotated(k) * sin
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.after_attention(x, mixed, functional.silu)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class T5Block(GatedBlock):
    """Attention written out, with a bias for positions and softmax in float32."""

    def __init__(self, width: int, heads: int, inner: int, tokens: int) -> None:
        super().__init__(width, heads, inner, T5Norm)
        self.bias = nn.Parameter(torch.zeros(1, heads, tokens, tokens))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream after the block."""
        q, k, v = self.heads_of(x)
        scores = torch.matmul(q, k.transpose(3, 2)) + self.bias
        weights = functional.softmax(scores.float(), -1).type_as(scores)
        return self.after_attention(x, torch.matmul(weights, v), _tanh_gelu)


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the images after the block."""
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(inner)))


class UNetBlock(nn.Module):
    """The block of a diffusion model's U-Net."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.GroupNorm(32, channels) for _ in range(2))
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the images after the block."""
        inner = self.conv1(functional.silu(self.norm1(x)))
        out: torch.Tensor = x + self.conv2(functional.silu(self.norm2(inner)))
        return out


class Head(nn.Module):
    """The last layer of a language model, and its loss."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.words = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross entropy."""
        logits = self.words(x)
        return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


class Gathered(nn.Module):
    """Linear layers with a norm in front, whose weights every rank has a part of, as under FSDP.

    The graph gathers them by itself, as SimpleFSDP does.

    Args:
        width: Of its input.
        num_ranks: How many ranks there are.
    """

    def __init__(self, width: int, num_ranks: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(torch.empty(4 * width // num_ranks, width))
        self.down = nn.Parameter(torch.empty(width // num_ranks, 4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream after the block."""
        inner = functional.gelu(functional.linear(self.norm(x), _gathered(self.up)))
        return x + functional.linear(inner, _gathered(self.down))


class SequenceParallel(nn.Module):
    """Feed-forward layers under tensor parallel, with the rows of the residual stream split.

    Args:
        width: Width of the input.
        num_ranks: Number of ranks.
    """

    def __init__(self, width: int, num_ranks: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width // num_ranks)
        self.down = nn.Linear(4 * width // num_ranks, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream of this rank after the block."""
        from torch.distributed import _functional_collectives, group

        assert group.WORLD is not None
        inner = self.down(functional.gelu(self.up(_gathered(self.norm(x)))))
        scatter = _functional_collectives.reduce_scatter_tensor_autograd
        out: torch.Tensor = x + scatter(inner, "sum", 0, group.WORLD)
        return out


def _gathered(part: torch.Tensor) -> torch.Tensor:
    """Returns the parts of all ranks, along the first dimension."""
    from torch.distributed import _functional_collectives, group

    assert group.WORLD is not None
    whole: torch.Tensor = _functional_collectives.all_gather_tensor_autograd(part, 0, group.WORLD)
    return whole
