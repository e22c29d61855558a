"""Models for the demo and benchmarks, with common shapes, random weights and no dropout."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class MLP(nn.Module):
    """Square linear layers with ReLU between them."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``(batch, width)`` to the same shape."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a Transformer."""

    width: int
    depth: int
    heads: int
    context: int


class Block(nn.Module):
    """Pre-norm Transformer block: self-attention and a perceptron, with residual connections."""

    def __init__(self, size: Size, *, is_causal: bool) -> None:
        """Creates a block; with ``is_causal``, positions only attend to earlier ones."""
        super().__init__()
        self.heads = size.heads
        self.is_causal = is_causal
        self.attention_norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, x: torch.Tensor, past: torch.Tensor | None = None) -> torch.Tensor:
        """Maps ``(batch, context, width)`` to the same shape."""
        x = x + self.attention_out(self._attend(self.attention_norm(x), past))
        change: torch.Tensor = self.mlp(x)
        return x + change

    def _attend(self, x: torch.Tensor, past: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        is_causal = self.is_causal and past is None
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return mixed.transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """Decoder like GPT-2, with learned positions and tied embeddings."""

    def __init__(self, num_tokens: int, size: Size) -> None:
        """Creates a model for up to ``size.context`` positions."""
        super().__init__()
        self.token = nn.Embedding(num_tokens, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size, is_causal=True) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        # The embedding is also the output layer: with this scale, initial logits are about 1.
        nn.init.normal_(self.token.weight, std=size.width**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps tokens ``(batch, context)`` to logits ``(batch, context, num_tokens)``."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


class Decoder(GPT):
    """GPT that computes the next token from cached keys and values."""

    def forward(self, token: torch.Tensor, past: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Returns the logits of the next token."""
        x = self.token(token) + self.position[past.shape[-2]]
        for block, block_past in zip(self.blocks, past.unbind(), strict=True):
            x = block(x, block_past)
        return F.linear(self.norm(x), self.token.weight)


class ViT(nn.Module):
    """Vision Transformer that classifies the mean of its patches."""

    def __init__(self, size: Size, patch: int, num_classes: int) -> None:
        """Creates a model for ``size.context`` patches of ``patch`` by ``patch`` pixels."""
        super().__init__()
        self.patches = nn.Conv2d(3, size.width, patch, stride=patch)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size, is_causal=False) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Maps images ``(batch, 3, height, width)`` to logits ``(batch, num_classes)``."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x).mean(1))
        return logits


class Residual(nn.Module):
    """Two 3x3 convolutions with a residual connection."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out_channels:
            self.shortcut.append(nn.Conv2d(channels, out_channels, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``(batch, channels, height, width)``."""
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return torch.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet with four stages; ResNet-18 for a width of 64 and two blocks per stage."""

    def __init__(self, width: int, blocks_per_stage: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList()
        channels = width
        for stage in range(4):
            for index in range(blocks_per_stage):
                stride = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(Residual(channels, width << stage, stride))
                channels = width << stage
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Maps images ``(batch, 3, height, width)`` to logits ``(batch, num_classes)``."""
        x = F.max_pool2d(torch.relu(self.norm(self.stem(images))), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


class LoopedCell(nn.Module):
    """LSTM cell that is called once per time step, so that its weights are used repeatedly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps inputs ``(steps, batch, width)`` to the last hidden state ``(batch, width)``."""
        hidden = cell = torch.zeros_like(x[0])
        for step in x.unbind():
            hidden, cell = self.cell(step, (hidden, cell))
        return hidden


class Loss(nn.Module):
    """Cross-entropy loss of a classifier."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss. Targets are class indices, one for each row of logits."""
        return F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())
