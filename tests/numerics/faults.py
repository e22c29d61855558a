"""Modules with one numerical fault each, and models to plant them in.

A fault loses precision; ``ops`` are the ops that repair it when they run in float32, as a
developer would repair it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WIDTH = 64


class SmallGradient(torch.autograd.Function):
    """A gradient that is made very small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad * 1e-7


class Lambda(nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A module with a fault.

    Attributes:
        make: Makes the module; it maps ``(..., WIDTH)`` to the same shape.
        dtype: The dtype in which it does harm.
        ops: Ops of which one has to be mended.
        stage: Where it shows.
    """

    make: Callable[[], nn.Module]
    dtype: str
    ops: tuple[str, ...]
    stage: str = "forward"


FAULTS: dict[str, Fault] = {}


def fault(
    dtype: str, *ops: str, stage: str = "forward"
) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """Registers a function of a tensor as a fault."""

    def register(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        FAULTS[function.__name__] = Fault(lambda: Lambda(function), dtype, ops, stage)
        return function

    return register


@fault("float16", "matmul")
def large_scores(x: Tensor) -> Tensor:
    scores = (x * 180) @ (x * 180).transpose(-1, -2)
    return (scores / 1e6).softmax(-1) @ x


@fault("float16", "exp")
def logsumexp_by_hand(x: Tensor) -> Tensor:
    return x - (x * 6).exp().sum(-1, keepdim=True).log() * 0.1


@fault("float16", "pow", "mean")
def norm_of_tiny_values(x: Tensor) -> Tensor:
    small = x * 1e-4
    return small * (small.pow(2).mean(-1, keepdim=True) + 1e-12).rsqrt()


@fault("float16", "pow", "mul")
def norm_of_large_values(x: Tensor) -> Tensor:
    large = x * 300
    return large * (large.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()


@fault("bfloat16", "mean", "pow", "mul", "sub")
def variance_by_squares(x: Tensor) -> Tensor:
    shifted = x + 30
    variance = shifted.pow(2).mean(-1, keepdim=True) - shifted.mean(-1, keepdim=True).pow(2)
    return x / (variance.abs() + 0.1).sqrt()


@fault("float16", "mean", "pow", "mul", "sub")
def variance_by_squares_in_half(x: Tensor) -> Tensor:
    shifted = x * 1.1 + 50.3
    variance = shifted.pow(2).mean(-1, keepdim=True) - shifted.mean(-1, keepdim=True).pow(2)
    return x / (variance.abs() + 0.1).sqrt()


@fault("float16", "add", "pow", "mul")
def eps_that_is_flushed(x: Tensor) -> Tensor:
    return x / (x.pow(4) + 1e-8) * 1e-5


@fault("float16", "pow", "exp", "mul")
def chain_of_exponentials(x: Tensor) -> Tensor:
    return x * (2 * x).exp().pow(2).pow(2).reciprocal()


@fault("bfloat16", "add")
def long_sum(x: Tensor) -> Tensor:
    total = x
    for _ in range(400):
        total = total + x * 0.01
    return total


@fault("float16", "sum")
def sum_of_many(x: Tensor) -> Tensor:
    return x + x.abs().mul(600).expand(8, *x.shape).sum((0, -1), keepdim=True)[0] * 1e-5


@fault("float16", "square", "mul", "pow")
def mean_of_squares(x: Tensor) -> Tensor:
    return x + ((x * 400).square().mean() * 1e-6)


@fault("bfloat16", "matmul", "outer", "mul")
def rope_angles(x: Tensor) -> Tensor:
    length = x.shape[-2]
    positions = torch.arange(1000, 1000 + length, dtype=x.dtype)
    frequencies = 10000 ** -(torch.arange(WIDTH, dtype=torch.float32) / WIDTH)
    angles = positions[:, None] @ frequencies[None]
    return x * angles.cos()


@fault("float16", "einsum")
def large_products(x: Tensor) -> Tensor:
    return x + torch.einsum("bld,bmd->blm", x * 150, x * 150).mean(-1, keepdim=True) * 1e-5


@fault("float16", "cumsum")
def running_sum(x: Tensor) -> Tensor:
    return x + (x.abs() * 9000).cumsum(-1) * 1e-6


@fault("bfloat16", "sub", "add", "mul")
def difference_of_near_values(x: Tensor) -> Tensor:
    first, second = x * 0.01 + 100, x * 0.011 + 100
    return x + (first - second) * 100


@fault("float16", "mul", "linear", "matmul")
def overflowing_gelu(x: Tensor) -> Tensor:
    h = x * 60
    return x + 0.5 * h * (1 + (0.79788 * (h + 0.044715 * h * h * h)).tanh()) * 0.01


@fault("float16", "pow", "mul", "sum")
def distances(x: Tensor) -> Tensor:
    y = x * 150
    squares = (y[..., :, None, :] - y[..., None, :, :]).pow(2).sum(-1)
    return x + squares.sqrt().mean(-1, keepdim=True) * 1e-4


@fault("bfloat16", "mul", "add", "remainder", "sub")
def phase_of_large_angle(x: Tensor) -> Tensor:
    return x + (x * 200 + 300).sin()


@fault("float16", "exp")
def softplus_by_hand(x: Tensor) -> Tensor:
    return (1 + (x * 12).exp()).log() * 0.1


@fault("float16", "mul", "clone", stage="backward")
def tiny_gradients(x: Tensor) -> Tensor:
    scaled: Tensor = SmallGradient.apply(x)  # type: ignore[no-untyped-call]
    return scaled


@fault("float16", "mul", "pow", stage="forward")
def cubes(x: Tensor) -> Tensor:
    return x + (x * 40) ** 3 * 1e-6


@fault("float16", "mul", "rsqrt", "add")
def reciprocal_of_flushed(x: Tensor) -> Tensor:
    return x + ((x * 1e-4) * (x * 1e-4)).add(1e-9).rsqrt() * 1e-6


@fault("bfloat16", "cumsum", "add", "mul")
def clock(x: Tensor) -> Tensor:
    steps = torch.ones_like(x).cumsum(-1) + 5000
    return x + ((steps * 1.001) * (x * 0 + 1)).sin()


@fault("bfloat16", "sigmoid")
def logarithm_of_what_became_zero(x: Tensor) -> Tensor:
    p = (x * 2).sigmoid()
    return x + 0.1 * (p * (1 - p).log())


@fault("float16", "sub", "mul", "add")
def inverse_of_a_difference(x: Tensor) -> Tensor:
    return x + 1e-6 / ((x * 1e-4 + 1) - 1 + 1e-12)


@fault("float16", "mul", "pow", "add")
def normalize_tiny(x: Tensor) -> Tensor:
    tiny = x * 3e-4
    return tiny / (tiny * tiny).sum(-1, keepdim=True).sqrt()


@fault("bfloat16", "sub", "add", "square")
def finite_difference(x: Tensor) -> Tensor:
    step = 1e-3
    return ((x + step).square() - (x - step).square()) / (2 * step)


@fault("float16", "bmm", "matmul")
def covariance(x: Tensor) -> Tensor:
    y = x.transpose(1, 2) * 130
    return x + torch.bmm(y, y.transpose(1, 2)).diagonal(dim1=-2, dim2=-1)[:, None] * 1e-6


@fault("bfloat16", "add")
def momentum_of_small_steps(x: Tensor) -> Tensor:
    state = torch.full_like(x, 8.0)
    for _ in range(150):
        state = state + 0.004 * x
    return x + (state - 8)


class Sound(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Layer(nn.Module):
    def __init__(self, extra: nn.Module | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.extra, self.into = extra, nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.into.weight)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in parts)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH / 4)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return x if self.extra is None else x + 0.3 * self.extra(self.into(self.norm2(x)))


class TinyGPT(nn.Module):
    """A GPT-like model with something extra in its second layer, or in several layers."""

    place = "h.1.extra"

    def __init__(
        self,
        extra: nn.Module | None = None,
        depth: int = 3,
        extras: Mapping[int, nn.Module | None] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(50, WIDTH), nn.Embedding(16, WIDTH)
        self.h = nn.ModuleList(Layer((extras or {1: extra}).get(i)) for i in range(depth))
        self.norm, self.head, self.loss = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50), loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.h:
            x = layer(x)
        return self.loss(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(50, (2, 9, 16), generator=generator)[:, :4]
        return tuple(tokens)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class TinyResNet(nn.Module):
    """A ResNet-like model with something extra before its last layer."""

    place = "extra"

    def __init__(self, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, bias=False), nn.BatchNorm2d(WIDTH))
        self.layer1, self.layer2 = Residual(WIDTH), Residual(WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.extra = extra
        self.fc = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layer2(self.layer1(F.relu(self.stem(x))))
        x = self.norm(F.adaptive_avg_pool2d(x, 4).flatten(2).transpose(1, 2))
        x = x if self.extra is None else x + 0.3 * self.extra(x)
        return F.cross_entropy(self.fc(x.mean(1)), y)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        images = torch.randn(8, 3, 10, 10, generator=generator)
        return images, torch.randint(10, (8,), generator=generator)


class Bare(nn.Module):
    """A linear layer, the fault, another one."""

    place = "bad"

    def __init__(self, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.bad = extra or Sound()
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.last(self.bad(self.norm(self.first(x))))
        return F.cross_entropy(h.flatten(0, 1), y.flatten())

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(4, 16, WIDTH, generator=generator)
        return x, torch.randint(10, (4, 16), generator=generator)


MODELS: dict[str, Any] = {"bare": Bare, "gpt": TinyGPT, "resnet": TinyResNet}


class Scores(nn.Module):
    """Scores that overflow float16, and their softmax."""

    def forward(self, x: Tensor) -> Tensor:
        scores = (x * 200) @ (x * 200).transpose(-1, -2)
        return (scores / 1e5).softmax(-1) @ x


class Rms(nn.Module):
    """A norm of small values, whose mean of squares float16 flushes."""

    def forward(self, x: Tensor) -> Tensor:
        small = x * 2e-4
        return small * (small.pow(2).mean(-1, keepdim=True) + 1e-12).rsqrt()


class Loss(nn.Module):
    """A cross entropy without the maximum taken off."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        large = logits * 12
        sums = large.exp().sum(-1).log()
        return (sums - large.gather(-1, targets[:, None])[:, 0]).mean()


def broken(places: tuple[int, int] = (0, 1), depth: int = 3) -> TinyGPT:
    """Returns a GPT-like model with three faults; none of its repairs helps alone."""
    extras = dict(zip(places, (Scores(), Rms()), strict=True))
    return TinyGPT(depth=depth, extras=extras, loss=Loss())
