"""Pictures of simple shapes, and small convolutional networks that learn from them."""

from __future__ import annotations

import torch
from torch import nn

SHAPES = ("disc", "square", "stripes", "checkers")
NOISE = 0.5


def shapes(num: int, size: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pictures of shapes.

    Args:
        num: How many.
        size: Pixels along each side.
        rng: Where kinds, places, sizes and colours come from.

    Returns:
        Pictures, ``(num, 3, size, size)`` in float32, of 0 and 1 times a colour; and what each
        shows, ``(num,)``, an index into ``SHAPES``.
    """
    kinds = torch.randint(len(SHAPES), (num,), generator=rng)
    centre = size * (0.3 + 0.4 * torch.rand(2, num, 1, 1, generator=rng))
    radius = size * (0.1 + 0.2 * torch.rand(num, 1, 1, generator=rng))
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    dy, dx = (y - centre[0]) / radius, (x - centre[1]) / radius
    inside = (dy.abs() < 1) & (dx.abs() < 1)
    stripes = (3 * dy).floor() % 2 == 0
    checkers = stripes ^ ((3 * dx).floor() % 2 == 0)
    drawn = torch.stack([dy**2 + dx**2 < 1, inside, inside & stripes, inside & checkers])
    chosen = drawn[kinds, torch.arange(num)].float()
    colours = 0.5 + 0.5 * torch.rand(num, 3, 1, 1, generator=rng)
    return chosen.unsqueeze(1) * colours, kinds


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms, around which the input is added."""

    def __init__(self, width: int) -> None:
        """A block with random weights."""
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``(batch, width, height, width)`` to the same shape."""
        return torch.relu(x + self.body(x))


class ResNet(nn.Module):
    """Classifier of pictures; the forward pass returns the loss."""

    def __init__(self, width: int, depth: int) -> None:
        """A network with random weights."""
        super().__init__()
        self.start = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(depth)))
        self.head = nn.Linear(width, len(SHAPES))

    def forward(self, pictures: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross entropy, in nats, of ``(batch, 3, size, size)`` pictures."""
        features = self.blocks(self.start(pictures)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(features), kinds)


class GroupBlock(nn.Module):
    """Two convolutions behind group norms, around which the input is added."""

    def __init__(self, width: int) -> None:
        """A block with random weights."""
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``(batch, width, height, width)`` to the same shape."""
        change = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            change = conv(nn.functional.silu(norm(change)))
        return x + change


class UNet(nn.Module):
    """Finds the noise in a picture; the forward pass returns the loss."""

    def __init__(self, width: int) -> None:
        """A network with random weights."""
        super().__init__()
        self.start = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(GroupBlock(width) for _ in range(3))
        self.join = nn.Conv2d(2 * width, width, 1)
        self.norm = nn.GroupNorm(4, width)
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, pictures: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Returns the mean square of what is missed of ``(batch, 3, size, size)`` noise."""
        before, low, after = self.blocks
        x = before(self.start(pictures + noise))
        up = nn.functional.interpolate(low(self.down(x)), scale_factor=2)
        x = after(self.join(torch.cat([x, up], 1)))
        found = self.end(nn.functional.silu(self.norm(x)))
        return nn.functional.mse_loss(found, noise)
