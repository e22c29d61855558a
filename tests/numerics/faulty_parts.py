"""Models of which one part is computed by hand, in a way that loses accuracy in low precision.

Other than in ``faults.py``, where something is added to a model, a fault is here in the place where
people make it: attention, activation, norm, loss.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.composed import Composed

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HEADS, LENGTH, WORDS, CHANNELS = 64, 4, 32, 64, 32


@dataclasses.dataclass(frozen=True)
class FaultyPart:
    """A part of a model that is computed by hand.

    Attributes:
        compute: The computation; what it takes depends on the place.
        place: The path of the module that calls it.
        dtype: The dtype in which it does harm.
        ops: Ops of which one has to be mended.
        stage: Where it shows.
        scale: Of the loss.
    """

    compute: Callable[..., Tensor]
    place: str
    dtype: str
    ops: tuple[str, ...]
    stage: str = "forward"
    scale: float = 1.0


PARTS: dict[str, FaultyPart] = {}


def part(
    place: str, dtypes: str, *ops: str, stage: str = "forward", scale: float = 1.0
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Registers a computation as a fault in some dtypes."""

    def register(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        for dtype in dtypes.split():
            name = f"{compute.__name__}-{dtype}"
            PARTS[name] = FaultyPart(compute, place, dtype, ops, stage, scale)
        return compute

    return register


# Attention: q, k, v of sizes (batch, heads, length, width).


@part("blocks.1.attn", "float16", "matmul", "mul")
def scaled_after_the_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q * 300) @ (k * 400).transpose(-1, -2)
    return (scores * 1e-5).softmax(-1) @ v


@part("blocks.0.attn", "float16", "exp")
def softmax_without_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-1, -2) * 8).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


@part("blocks.2.attn", "bfloat16", "matmul", "div")
def low_temperature(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / 0.004).softmax(-1) @ v * 2


@part("blocks.1.attn", "float16", "add")
def two_masks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    mask = torch.zeros(LENGTH, LENGTH, dtype=scores.dtype).masked_fill(
        torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -65504.0
    )
    padding = torch.zeros_like(mask)
    padding[0] = -65504.0
    return (scores + (mask + padding) + padding).softmax(-1) @ v


@part("blocks.1.attn", "bfloat16 float16", "_to_copy", "mul", "cos", "sin")
def rotary_positions_in_low(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(4001, 4001 + LENGTH).to(q.dtype)
    frequencies = 10000 ** -(torch.arange(0, q.shape[-1], 2) / q.shape[-1])
    angles = positions[:, None] * frequencies.to(q.dtype)

    def turn(x: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
        return torch.stack(turned, -1).flatten(-2)

    return F.scaled_dot_product_attention(turn(q * 4), turn(k * 4) * 3, v * 2)


@part("blocks.1.attn", "bfloat16", "log", "mul", "_to_copy", "sub")
def buckets_of_distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distances = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]).abs() + 1000
    buckets = (torch.log(distances.to(q.dtype)) * 300 - 1900).long().clamp(0, 599)
    bias = torch.randn(600, HEADS, generator=torch.Generator().manual_seed(0)) * 3
    scores = q @ k.transpose(-1, -2) / 4 + bias[buckets].permute(2, 0, 1)
    return scores.softmax(-1).to(v.dtype) @ v * 4


# Activations: x of sizes (batch, length, 4 * WIDTH).


@part("blocks.1.mlp", "float16", "square", "mul")
def squared_relu(x: Tensor) -> Tensor:
    return (F.relu(x) * 400).square() * 1e-5


@part("blocks.1.mlp", "float16", "exp")
def swish_by_hand(x: Tensor) -> Tensor:
    x = x * 16
    return x * x.exp() / (1 + x.exp()) / 8


@part("blocks.0.mlp", "bfloat16", "erf", "rsub")
def complementary_error_function(x: Tensor) -> Tensor:
    return (1 - torch.erf(F.relu(x) * 2 + 2.6)) * 4000


@part("blocks.1.mlp", "bfloat16", "exp", "sub")
def expm1_by_hand(x: Tensor) -> Tensor:
    return ((x * 1e-3).exp() - 1) * 1e3


@part("blocks.1.mlp", "bfloat16", "add", "log")
def log1p_by_hand(x: Tensor) -> Tensor:
    return (1 + x * 1e-3).log() * 1e3


@part("blocks.1.mlp", "float16", "sigmoid", "log", "mul")
def logsigmoid_by_hand(x: Tensor) -> Tensor:
    return (x * 30).sigmoid().log() * 0.05


@part("blocks.1.mlp", "float16", "cumprod", "mul")
def product_of_probabilities(x: Tensor) -> Tensor:
    return x.sigmoid().cumprod(-1).log().clamp(min=-300) * 0.01


@part("blocks.1.mlp", "float16", "sum")
def sum_in_half(x: Tensor) -> Tensor:
    total = (x.abs() * 5000).half().sum(-1, keepdim=True)
    return x * (total.float() * 1e-6).to(x.dtype)


@part("blocks.1.mlp", "bfloat16", "add_", "add")
def sum_in_place(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[:, 0])
    for step in range(16 * LENGTH):
        total += x[:, step % LENGTH].abs() + 0.3
    return x + total[:, None] / 100


@part("blocks.1.mlp", "bfloat16", "add_", "add")
def counter(x: Tensor) -> Tensor:
    count = torch.zeros_like(x)
    for _ in range(400):
        count.add_(1)
    return x * (count / 400)


@part("blocks.1.mlp", "bfloat16", "sigmoid", "add", "mul")
def decay_next_to_one(x: Tensor) -> Tensor:
    decay, state = torch.sigmoid(x * 0.1 + 7), x
    for _ in range(300):
        state = decay * state
    return state * 2


@part("blocks.1.mlp", "bfloat16", "mul_", "add_")
def moving_average(x: Tensor) -> Tensor:
    state = torch.zeros_like(x)
    for _ in range(300):
        state.mul_(0.999).add_(x * 0.001)
    return state * 12


@part("blocks.1.mlp", "float16", "full_like", "add")
def eps_of_its_own_dtype(x: Tensor) -> Tensor:
    active = F.relu(x - 1)
    return active / (active.pow(2) + torch.full_like(x, 1e-8)).sqrt() * 0.5


@part("blocks.1.mlp", "bfloat16", "div", "mul", "sum", "sqrt")
def angle_between_near_vectors(x: Tensor) -> Tensor:
    first, second = x, x + 0.02 * torch.sin(x * 7)
    first = first / (first * first).sum(-1, keepdim=True).sqrt()
    second = second / (second * second).sum(-1, keepdim=True).sqrt()
    return x * (1 + torch.acos((first * second).sum(-1, keepdim=True).clamp(-1, 1)) * 20)


@part("blocks.1.mlp", "bfloat16", "mul", "linear", "add")
def index_of_a_value(x: Tensor) -> Tensor:
    table: Tensor = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    return x + table[((x * 0.1 + 0.5) * 1000).long().clamp(0, 4095)]


@part("blocks.1.mlp", "float16", "linalg_vector_norm", "norm")
def norm_of_a_large_vector(x: Tensor) -> Tensor:
    large = x * 20000
    norm: Tensor = torch.linalg.vector_norm(large, dim=-1, keepdim=True)
    return large / (norm + 1) * 4


@part("blocks.1.mlp", "bfloat16", "mul", "rsub", "sigmoid")
def chaotic_recurrence(x: Tensor) -> Tensor:
    state = x.sigmoid()
    for _ in range(14):
        state = 3.9 * state * (1 - state)
    return state - 0.5


@part("blocks.1.mlp", "float16", "_to_copy", "log")
def gumbel_noise(x: Tensor) -> Tensor:
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    return x - 0.1 * torch.log(-torch.log(noise.clamp(1e-6, 1 - 1e-6).to(x.dtype)))


@part("blocks.*.mlp", "float16", "exp")
def exponential_in_all_layers(x: Tensor) -> Tensor:
    x = x * 17
    return x * x.exp() / (1 + x.exp()) * 0.1


# Norms: x of sizes (batch, length, WIDTH), low.


@part("blocks.1.norm2", "float16", "pow", "mul")
def root_mean_square_of_large(x: Tensor) -> Tensor:
    x = x * 400
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@part("blocks.1.norm1", "bfloat16", "mean", "mul", "sub", "add")
def variance_by_moments(x: Tensor) -> Tensor:
    x = x + 25
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) / (variance.clamp(min=0) + 1e-2).sqrt()


@part("norm", "float16", "mul", "sum")
def norm_of_tiny(x: Tensor) -> Tensor:
    x = x * 2e-5
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-14) * 8


@part("blocks.0.norm2", "float16", "add", "sum")
def nothing_by_eps(x: Tensor) -> Tensor:
    x = F.relu(x - 1.5)
    x = torch.cat([x[:, :1] * 0, x[:, 1:]], 1)
    return x / (x.abs().sum(-1, keepdim=True) + 1e-9) * 8


@part("blocks.1.norm1", "float16", "var")
def variance_beyond_range(x: Tensor) -> Tensor:
    x = x * 400
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()


# Losses: logits of sizes (tokens, WORDS), low, and targets.


@part("criterion", "float16", "exp")
def cross_entropy_without_maximum(z: Tensor, y: Tensor) -> Tensor:
    z = z * 12
    return (z.exp().sum(-1).log() - z.gather(-1, y[:, None])[:, 0]).mean()


@part("criterion", "bfloat16", "add")
def large_offset(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((z + 700).float(), y)


@part("criterion", "bfloat16 float16", "rsub", "sigmoid", "add")
def binary_cross_entropy_by_hand(z: Tensor, y: Tensor) -> Tensor:
    target, p = F.one_hot(y, WORDS).to(z.dtype), (z * 4 + 6).sigmoid()
    return -(target * (p + 1e-7).log() + (1 - target) * (1 - p + 1e-7).log()).float().mean()


@part("criterion", "float16", "sum")
def mean_by_hand(z: Tensor, _: Tensor) -> Tensor:
    squares = (z * 30).square().flatten()
    return squares.sum() / squares.numel()


@part("criterion", "float16", "softmax", "div", "_to_copy")
def divergence_by_hand(z: Tensor, _: Tensor) -> Tensor:
    p = (z * 20).softmax(-1).to(z.dtype)
    q = torch.full_like(p, 1 / WORDS)
    return (q * (q / p).log()).sum(-1).float().mean()


@part("criterion", "bfloat16", "mul", "sum", "sub", "matmul")
def distances_by_products(z: Tensor, y: Tensor) -> Tensor:
    centres = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0)) * 0.3 + 8
    z = z + 8
    squares = (z * z).sum(-1, keepdim=True) + (centres * centres).sum(-1)
    return F.cross_entropy(-(squares - 2 * z @ centres.t()).float() * 0.2, y)


@part("criterion", "float16", "_to_copy")
def targets_beyond_range(z: Tensor, y: Tensor) -> Tensor:
    target = (y.float() * 3000).to(z.dtype)
    return F.smooth_l1_loss(z.float().mean(-1), target.float() * 1e-3)


# Inside of a residual block: x of sizes (batch, CHANNELS, 12, 12), low.


@part("layers.1.extra", "float16", "mean", "mul", "square", "sub")
def batch_norm_by_moments(x: Tensor) -> Tensor:
    x = x * 0.3 + 60
    mean = x.mean((0, 2, 3), keepdim=True)
    variance = (x * x).mean((0, 2, 3), keepdim=True) - mean * mean
    return (x - mean) * torch.rsqrt(variance + 1e-3)


@part("layers.0.extra", "bfloat16", "mean", "square", "sub", "add")
def group_norm_by_moments(x: Tensor) -> Tensor:
    groups: Tensor = (x + 16).unflatten(1, (4, -1))  # type: ignore[no-untyped-call]
    mean = groups.mean((2, 3, 4), keepdim=True)
    variance = groups.square().mean((2, 3, 4), keepdim=True) - mean.square()
    result: Tensor = ((groups - mean) * (variance.clamp(min=0) + 1e-3).rsqrt()).flatten(1, 2)
    return result


@part("layers.1.extra", "float16", "pow", "mul")
def polynomial(x: Tensor) -> Tensor:
    return x + (x * 3) ** 9 * 1e-7


@part("layers.1.extra", "float16", "sum")
def sum_of_all_pixels(x: Tensor) -> Tensor:
    return x * ((x.abs() * 900).sum((2, 3), keepdim=True) / 144 * 1e-3)


@part("layers.1.extra", "float16", "pow", "sum")
def norm_of_all_channels(x: Tensor) -> Tensor:
    x = x * 70
    return x / (x.pow(2).sum((1, 2, 3), keepdim=True).sqrt() + 1e-3) * 30


@part("layers.0.extra", "bfloat16", "_to_copy", "mul")
def time_steps_in_low(x: Tensor) -> Tensor:
    times = torch.arange(901, 901 + len(x)).to(x.dtype)
    frequencies = torch.exp(-torch.arange(CHANNELS // 2) * math.log(1e4) / (CHANNELS // 2))
    angles = times[:, None] * frequencies.to(x.dtype)
    return x + torch.cat([angles.sin(), angles.cos()], -1)[..., None, None]


@part("layers.0.extra", "float16", "mul")
def inverse_of_flushed(x: Tensor) -> Tensor:
    small = x * 1e-4
    return 1e-7 / (small * small + 1e-9)


class _Clip(torch.autograd.Function):
    """Clips a gradient by its norm, computed by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        gradient = gradient * 3000
        return gradient / gradient.pow(2).sum().sqrt()


@part("layers.1.extra", "float16", "pow", "sum", stage="backward", scale=1024.0)
def gradient_clipping_inside(x: Tensor) -> Tensor:
    clipped: Tensor = _Clip.apply(x)  # type: ignore[no-untyped-call]
    return clipped * 1.0


def _at(given: FaultyPart | None, place: str) -> Callable[..., Tensor] | None:
    """Returns the computation by hand for a place, if there is one."""
    if given is None or given.place not in (
        place.strip("."),
        f"blocks.*.{place.rpartition('.')[2]}",
    ):
        return None
    return given.compute


def attention(by_hand: Callable[..., Tensor] | None) -> nn.Module:
    mix = by_hand or F.scaled_dot_product_attention

    def forward(module: Any, x: Tensor) -> Any:
        parts = module.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return module.out(mix(*parts).transpose(1, 2).flatten(2))

    return Composed(forward, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH))


def mlp(by_hand: Callable[..., Tensor] | None) -> nn.Module:
    act = by_hand or F.gelu
    up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    return Composed(lambda module, x: module.down(act(module.up(x))), up=up, down=down)


def norm(by_hand: Callable[..., Tensor] | None) -> nn.Module:
    """A norm by hand, of what a product has made low."""

    def forward(module: Any, x: Tensor) -> Any:
        return F.layer_norm(x, (WIDTH,)) if by_hand is None else by_hand(x @ module.scale)

    return Composed(forward, scale=nn.Parameter(torch.eye(WIDTH)))


def block(given: FaultyPart | None, place: str) -> nn.Module:
    def forward(module: Any, x: Tensor) -> Any:
        x = x + module.attn(module.norm1(x))
        return x + module.mlp(module.norm2(x))

    norms = {f"norm{i}": norm(_at(given, f"{place}.norm{i}")) for i in (1, 2)}
    attn, last = attention(_at(given, f"{place}.attn")), mlp(_at(given, f"{place}.mlp"))
    return Composed(forward, **norms, attn=attn, mlp=last)


def gpt(given: FaultyPart | None) -> nn.Module:
    """A GPT-like model with a part by hand."""
    loss = _at(given, "criterion.") or F.cross_entropy

    def forward(module: Any, tokens: Tensor, targets: Tensor) -> Any:
        x = module.embed(tokens) + module.position.weight
        for each in module.blocks:
            x = each(x)
        return module.criterion(module.head(module.norm(x)).flatten(0, 1), targets.flatten())

    return Composed(
        forward,
        embed=nn.Embedding(WORDS, WIDTH),
        position=nn.Embedding(LENGTH, WIDTH),
        blocks=nn.ModuleList(block(given, f"blocks.{i}") for i in range(3)),
        norm=norm(_at(given, "norm.")),
        head=nn.Linear(WIDTH, WORDS),
        criterion=Composed(lambda _, logits, targets: loss(logits, targets)),
    )


def residual(given: FaultyPart | None, place: str) -> nn.Module:
    compute = _at(given, f"{place}.extra") or F.silu

    def forward(module: Any, x: Tensor) -> Tensor:
        h = module.bn2(module.conv2(F.relu(module.bn1(module.conv1(x)))))
        return F.relu(x + module.extra(h))

    convolutions = {f"conv{i}": nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for i in (1, 2)}
    norms = {f"bn{i}": nn.BatchNorm2d(CHANNELS) for i in (1, 2)}
    conv = nn.Conv2d(CHANNELS, CHANNELS, 1)
    extra = Composed(lambda module, x: compute(module.conv(x)), conv=conv)
    return Composed(forward, **convolutions, **norms, extra=extra)


def resnet(given: FaultyPart | None) -> nn.Module:
    """A ResNet-like model with a part by hand."""

    def forward(module: Any, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(module.stem(x))
        for layer in module.layers:
            x = layer(x)
        return F.cross_entropy(module.fc(x.mean((2, 3))), y)

    stem = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS))
    layers = nn.ModuleList(residual(given, f"layers.{i}") for i in range(2))
    return Composed(forward, stem=stem, layers=layers, fc=nn.Linear(CHANNELS, 10))


def model_with(given: FaultyPart | None, kind: str = "") -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model that a part belongs to, or a sound one of a kind, ``"gpt"`` or ``"resnet"``.

    Returns:
        The model and inputs.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    if given.place.startswith("layers") if given is not None else kind == "resnet":
        images = torch.randn(8, 3, 12, 12, generator=generator)
        return resnet(given), (images, torch.randint(10, (8,), generator=generator))
    return gpt(given), tuple(torch.randint(WORDS, (2, 4, LENGTH), generator=generator))
