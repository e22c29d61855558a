"""Model by model on the CPU: amp_fx against eager ``torch.autocast``, bit for bit, both ways in.

Outputs, losses, every gradient, and every parameter and buffer after the run. Each case is a
function that builds its subject anew from one seed; what it checks is its name.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from amp_fx.dtypes import dtype_name
from tests.parity import exceptions, oracle
from tests.parity.oracle import LOW_DTYPES, Subject, Way

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.parity.oracle import Program

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclasses.dataclass
class Case:
    """A subject to be built, and how it is compiled."""

    build: Callable[[], Subject]
    ways: tuple[Way, ...] = tuple(Way)
    compile_options: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES: dict[str, Case] = {}


def case(
    *ways: Way, **compile_options: Any
) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    """Register a builder under its name; for both ways unless some are given."""

    def register(build: Callable[[], Subject]) -> Callable[[], Subject]:
        CASES[build.__name__] = Case(build, ways or tuple(Way), compile_options)
        return build

    return register


def leaf(*shape: int) -> Tensor:
    """A random input that requires grad."""
    return torch.randn(*shape, requires_grad=True)


def mlp(width: int = 16, out: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, out))


# Transformers and attention


@case()
def transformer_encoder() -> Subject:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return Subject(nn.TransformerEncoder(layer, 2), (leaf(2, 8, 32),))


@case()
def transformer_encoder_norm_first() -> Subject:
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
    )
    return Subject(nn.TransformerEncoder(layer, 2), (leaf(2, 8, 32),))


@case()
def transformer_encoder_eval() -> Subject:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()

    def drive(program: Program, x: Tensor) -> Any:
        with torch.no_grad():
            return program(x)

    return Subject(model, (torch.randn(2, 8, 32),), drive=drive)


@case()
def transformer_with_masks() -> Subject:
    model = nn.Transformer(32, 4, 1, 1, 64, dropout=0.1, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.tensor([[False] * 5 + [True] * 3, [False] * 8])

    def forward(source: Tensor, target: Tensor, mask: Tensor, padding: Tensor) -> Any:
        return model(
            source,
            target,
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )

    return Subject(forward, (leaf(2, 8, 32), leaf(2, 6, 32), mask, padding), module=model)


class Block(nn.Module):
    """A causal decoder block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Decoder(nn.Module):
    """A decoder-only language model with tied embeddings and its loss."""

    def __init__(self, vocabulary: int = 50, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return logits, loss


@case()
def decoder_only_with_tied_weights_and_loss() -> Subject:
    return Subject(Decoder(), (torch.randint(50, (2, 12)),))


@case()
def multihead_attention() -> Subject:
    model = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
    padding = torch.tensor([[False] * 6 + [True] * 2, [False] * 8])

    def forward(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Any:
        return model(q, k, v, key_padding_mask=padding, need_weights=True)

    return Subject(forward, (leaf(2, 4, 32), leaf(2, 8, 32), leaf(2, 8, 32), padding), module=model)


@case()
def attention_written_out() -> Subject:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)

    return Subject(forward, (leaf(2, 6, 4, 8), leaf(2, 6, 4, 8), leaf(2, 6, 4, 8)))


@case()
def attention_with_float_mask_and_dropout() -> Subject:
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.2)

    args = (leaf(2, 4, 6, 8), leaf(2, 4, 6, 8), leaf(2, 4, 6, 8), torch.randn(6, 6))
    return Subject(forward, args)


@case()
def flex_attention_in_eval() -> Subject:
    project = nn.Linear(32, 96)

    def causal(score: Tensor, _b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(q >= k, score, -float("inf"))

    def forward(x: Tensor) -> Any:
        q, k, v = project(x).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, score_mod=causal)

    def drive(program: Program, x: Tensor) -> Any:
        with torch.no_grad():
            return program(x)

    return Subject(forward, (torch.randn(2, 8, 32),), module=project, drive=drive)


# Recurrent and convolutional nets


class Cells(nn.Module):
    """Steps a cell over a sequence."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.out(hidden), state


@case()
def lstm_cell() -> Subject:
    return Subject(Cells(nn.LSTMCell(8, 16)), (leaf(2, 3, 8),))


@case()
def gru_cell() -> Subject:
    return Subject(Cells(nn.GRUCell(8, 16)), (leaf(2, 3, 8),))


@case()
def rnn_cell() -> Subject:
    return Subject(Cells(nn.RNNCell(8, 16)), (leaf(2, 3, 8),))


class Recurrent(nn.Module):
    """A recurrent module of torch between two linear layers."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.inp, self.rnn, self.out = nn.Linear(8, 8), rnn, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        hidden, _ = self.rnn(self.inp(x))
        return self.out(hidden)


@case(Way.AMBIENT)
def lstm() -> Subject:
    return Subject(Recurrent(nn.LSTM(8, 16, num_layers=2, batch_first=True)), (leaf(2, 3, 8),))


@case(Way.AMBIENT)
def gru() -> Subject:
    return Subject(Recurrent(nn.GRU(8, 16, batch_first=True)), (leaf(2, 3, 8),))


class Residual(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, inp: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inp, out, 3, 2, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(inp, out, 1, 2, bias=False)
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(out) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.bn3(self.skip(x))
        return F.relu(y, inplace=True)


def resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        Residual(8, 16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def twice(program: Program, x: Tensor) -> list[Any]:
    return [program(x), program(x * 2)]


@case()
def resnet_and_its_running_stats() -> Subject:
    return Subject(resnet(), (leaf(4, 3, 16, 16),), drive=twice)


@case()
def resnet_eval() -> Subject:
    return Subject(resnet().eval(), (leaf(4, 3, 16, 16),))


class UNet(nn.Module):
    """Down, up by interpolation and by transposed convolution, with skips and GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.down2 = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU())
        self.down3 = nn.Conv2d(16, 16, 3, 2, 1)
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.join2 = nn.Conv2d(32, 8, 3, 1, 1)
        self.join1 = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(a)
        c = self.up(self.down3(b))
        d = self.join2(torch.cat([b, c], 1))
        e = F.interpolate(d, scale_factor=2, mode="bilinear", align_corners=False)
        result: Tensor = self.join1(torch.cat([a, e], 1))
        return result


@case()
def unet() -> Subject:
    return Subject(UNet(), (leaf(2, 3, 16, 16),))


@case()
def convolutions_of_one_and_three_dimensions() -> Subject:
    model = nn.ModuleList([nn.Conv1d(3, 4, 3), nn.Conv3d(3, 4, 3), nn.ConvTranspose1d(4, 2, 3)])

    def forward(x: Tensor, y: Tensor) -> Any:
        return model[2](model[0](x).tanh()), F.avg_pool3d(model[1](y), 2)

    return Subject(forward, (leaf(2, 3, 8), leaf(2, 3, 6, 6, 6)), module=model)


# What a trace cannot see


class NotItsDerivative(torch.autograd.Function):
    """A function whose backward is deliberately not its forward's derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight).relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.full_like(x, 3.0) * grad.float().sum(), torch.sign(weight) * 0.25


@case()
def autograd_function() -> Subject:
    model = mlp()

    def forward(x: Tensor, weight: Tensor) -> Any:
        return NotItsDerivative.apply(model(x), weight).sin()  # type: ignore[no-untyped-call]

    return Subject(forward, (leaf(4, 16), leaf(16, 16)), module=model)


@case()
def activation_checkpoint() -> Subject:
    first, second = mlp(), mlp()

    def forward(x: Tensor) -> Any:
        y = checkpoint(first, x, use_reentrant=False)
        y = checkpoint(lambda z: F.dropout(second(z), 0.3).softmax(-1), y, use_reentrant=False)
        return y @ y.mT

    return Subject(forward, (leaf(4, 16),), module=nn.ModuleList([first, second]))


@case()
def checkpoint_shares_a_weight_with_its_surroundings() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        return model(checkpoint(model, model(x), use_reentrant=False))

    return Subject(forward, (leaf(4, 16),), module=model)


@case()
def autograd_function_shares_a_weight_with_its_surroundings() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        y = NotItsDerivative.apply(x @ w, w)  # type: ignore[no-untyped-call]
        return y @ w

    return Subject(forward, (leaf(4, 16), leaf(16, 16)))


@case()
def vmap_of_shared_weight_only() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        return torch.vmap(lambda row: torch.relu(row @ w) @ w)(x)

    return Subject(forward, (leaf(4, 16), leaf(16, 16)))


@case()
def vmap() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        return torch.vmap(lambda row: torch.mv(w, torch.relu(w @ row)))(x), torch.mm(x, w)

    return Subject(forward, (leaf(4, 16), leaf(16, 16)))


@case()
def func_grad() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        inner = torch.func.grad(lambda z: F.mse_loss(torch.mm(z, w), torch.zeros_like(z)))(x)
        return torch.mm(inner, w)

    return Subject(forward, (leaf(4, 16), leaf(16, 16)))


@case()
def cond() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        y = model(x)
        return torch.cond(
            x.sum() > 0, lambda z: torch.mm(z, z.t()), lambda z: torch.mm(z * 2, z.t()), (y,)
        )

    def drive(program: Program, x: Tensor) -> Any:
        with torch.no_grad():
            return [program(x), program(-x)]

    return Subject(forward, (torch.randn(4, 16),), module=model, drive=drive)


# Regions


@case()
def nested_disabled_region() -> Subject:
    model, other = mlp(), mlp()

    def forward(x: Tensor) -> Any:
        y = model(x)
        with torch.autocast("cpu", enabled=False):
            z = model(torch.mm(y.float(), x.mT) @ x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = other(z)
        return model(z.float()) + y

    return Subject(forward, (leaf(4, 16),), module=nn.ModuleList([model, other]))


@case()
def nested_region_of_another_dtype() -> Subject:
    models = nn.ModuleList(mlp() for _ in range(3))

    def forward(x: Tensor) -> Any:
        outputs = [models[0](x * 2)]
        for model, dtype in zip(models[1:], LOW_DTYPES, strict=True):
            with torch.autocast("cpu", dtype=dtype):
                outputs.append(model(outputs[-1].float()))
        return [*outputs, models[0](outputs[-1].float())]

    return Subject(forward, (leaf(4, 16),), module=models)


@case()
def frozen_weight_in_regions_of_two_dtypes() -> Subject:
    """Eager's cache mixes the dtypes up, so only a weight that it never caches has an oracle."""
    model = mlp().requires_grad_(requires_grad=False)

    def forward(x: Tensor) -> Any:
        outputs = [model(x * 2)]
        for dtype in LOW_DTYPES:
            with torch.autocast("cpu", dtype=dtype):
                outputs.append(model(x * 2))
        return [*outputs, model(x * 2)]

    return Subject(forward, (leaf(4, 16),), module=model)


@case()
def nested_region_without_cache() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        y = model(model(x))
        with torch.autocast("cpu", cache_enabled=False, dtype=torch.bfloat16):
            z = model(model(x))
        return y, z, model(x)

    return Subject(forward, (leaf(4, 16),), module=model)


@case(Way.AMBIENT)
def region_without_cache() -> Subject:
    model = mlp()
    return Subject(lambda x: model(model(x)), (leaf(4, 16),), module=model, cache_enabled=False)


@case(Way.AMBIENT)
def two_calls_in_one_region() -> Subject:
    return Subject(mlp(), (leaf(4, 16),), drive=twice, has_one_region=True)


@case(Way.AMBIENT)
def backward_inside_the_region() -> Subject:
    def drive(program: Program, x: Tensor) -> Any:
        y = program(x)
        return y.detach(), torch.autograd.grad(y.float().square().sum(), x)

    return Subject(mlp(), (leaf(4, 16),), drive=drive, has_one_region=True)


@case()
def region_as_decorator() -> Subject:
    model, other = mlp(), mlp()

    @torch.autocast("cpu", dtype=torch.float16)  # type: ignore[untyped-decorator]
    def inner(x: Tensor) -> Any:
        return model(x)

    def forward(x: Tensor) -> Any:
        y = inner(x * 2)
        return y, other(y.float())

    return Subject(forward, (leaf(4, 16),), module=nn.ModuleList([model, other]))


@case()
def branch_on_autocast_state() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        y = model(x)
        return y * 2 if torch.is_autocast_enabled("cpu") else y * 3

    return Subject(forward, (leaf(4, 16),), module=model)


# Weights and inputs


@case()
def tied_weights() -> Subject:
    model = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
    model[1].weight = model[0].weight

    def forward(x: Tensor) -> Any:
        for layer in model:
            x = layer(x).relu()
        return F.linear(x, model[0].weight.t()) + model[2].weight.sum()  # type: ignore[operator]

    return Subject(forward, (leaf(4, 16),), module=model)


@case()
def one_input_used_often() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        y = x * 2
        return y @ w, y @ w.t(), (y @ w).softmax(-1) @ w, w.view(8, 32) @ w.view(32, 8), x @ x.mT

    return Subject(forward, (leaf(4, 16), leaf(16, 16)))


@case()
def one_value_under_two_names() -> Subject:
    """A call with one tensor twice, then one of the same shapes with two different tensors."""

    def forward(x: Tensor, y: Tensor, z: Tensor) -> Any:
        return torch.mm(x, x.float()), torch.mm(y, z), F.linear(y, y.contiguous()), F.linear(z, y)

    return Subject(forward, (leaf(4, 4), leaf(4, 4), leaf(4, 4)))


@case()
def weight_behind_calls_that_return_it_unchanged() -> Subject:
    """``.float()`` of a float32 leaf is the leaf itself: eager shares its cast."""

    def forward(x: Tensor, v: Tensor, w: Tensor) -> Any:
        y = (x @ v.float()) @ v.contiguous()
        return F.dropout(y @ w.to(torch.float32), 0.5, training=False) @ w

    return Subject(forward, (leaf(4, 16), leaf(16, 16), leaf(16, 16)))


@case()
def frozen_weights() -> Subject:
    model = nn.Sequential(mlp(), mlp(), mlp())
    model[0].requires_grad_(requires_grad=False)
    model[1][0].weight.requires_grad_(requires_grad=False)  # type: ignore[index]
    return Subject(lambda x: model(model(x)), (torch.randn(4, 16),), module=model)


@case()
def no_tensor_requires_grad() -> Subject:
    model = mlp().requires_grad_(requires_grad=False)
    return Subject(lambda x: model(model(x)), (torch.randn(4, 16),), module=model)


@case()
def float64_part() -> Subject:
    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16).double()])

    def forward(x: Tensor) -> Any:
        y = model[1](model[0](x).double())
        return y, model[0](y.float()), F.mse_loss(y, x.double())

    return Subject(forward, (leaf(4, 16),), module=model)


@case()
def integers_only() -> Subject:
    def forward(x: Tensor, mask: Tensor) -> Any:
        return (x @ x.mT).cumsum(0), x.sum(), mask & (x > 2), x.argmax(-1), x.shape[0]

    return Subject(forward, (torch.randint(9, (4, 4)), torch.randint(2, (4, 4)).bool()))


@case()
def model_in_bfloat16() -> Subject:
    return Subject(mlp().bfloat16(), (torch.randn(4, 16).bfloat16().requires_grad_(),))


@case()
def model_in_float16() -> Subject:
    return Subject(mlp().half(), (torch.randn(4, 16).half().requires_grad_(),))


@case()
def parameters_of_mixed_dtypes() -> Subject:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16).bfloat16(), nn.Linear(16, 16))

    def forward(x: Tensor) -> Any:
        for layer in model:
            x = layer(x.to(layer.weight.dtype))  # type: ignore[arg-type]
        return x

    return Subject(forward, (leaf(4, 16),), module=model)


@case(Way.AMBIENT)
def calls_of_mixed_dtypes() -> Subject:
    def forward(x: Tensor, y: Tensor, kernel: Tensor) -> Any:
        return torch.bmm(x, y), F.conv1d(x, kernel), torch.cat([x, y]), x + y

    y = torch.randn(2, 4, 4).bfloat16().requires_grad_()
    return Subject(forward, (leaf(2, 4, 4), y, torch.randn(2, 4, 1).half()))


@case()
def casts_by_hand() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        y = model(x).float()
        z = model(y.to(torch.bfloat16).to(y.dtype)).type(torch.float32)
        return (
            z.softmax(-1, dtype=torch.float32),
            z.sum(dtype=torch.float64),
            z.half() @ x.half().mT,
        )

    return Subject(forward, (leaf(4, 16),), module=model)


@case()
def dtype_dependent_python() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        y = model(x)
        z = torch.mm(y, torch.eye(16, dtype=y.dtype, device=y.device))
        z = z + x.to(y.dtype) + torch.zeros_like(y) + y.new_ones(16)
        return torch.where(z > 0, z, torch.finfo(torch.float16).tiny)

    return Subject(forward, (leaf(4, 16),), module=model)


# Mutation and aliasing


@case()
def in_place_ops() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        y = model(x)
        y.add_(x).mul_(0.5)
        y[:, :2] = x[:, :2] * 2
        y.masked_fill_(y < -1, -1.0)
        z = torch.zeros(4, 16)
        z.addmm_(y.float(), (y.float().mT @ x).float())
        z.copy_(z + model(z))
        z[torch.tensor([0, 1])] += 1
        return y, z

    return Subject(forward, (leaf(4, 16),), module=model)


class Counting(nn.Module):
    """Writes to buffers, one of which an op with a policy reads."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16, 16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) @ self.mean.clone()
        self.mean.lerp_((x.detach().mT @ x.detach()).float(), 0.1)
        self.calls.add_(1)
        return torch.mm(y, self.mean.clone())


@case()
def buffers_written_to() -> Subject:
    return Subject(Counting(), (leaf(4, 16),), drive=twice)


@case()
def input_written_to() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        y = x @ w
        x.add_(1)
        z = x @ w
        x[0] = z.detach()[0].float()
        return y, z, x @ w

    return Subject(forward, (torch.randn(16, 16), leaf(16, 16)))


def optimizer_steps(model: nn.Module, program: Program, x: Tensor) -> list[Any]:
    """Three steps of SGD, whose weights the later ones must see."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    outputs = []
    for _ in range(3):
        y = program(x)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(y.detach())
    return outputs


@case()
def weights_updated_between_calls() -> Subject:
    model = mlp()
    return Subject(model, (torch.randn(4, 16),), drive=functools.partial(optimizer_steps, model))


@case()
def weight_written_in_a_no_grad_region() -> Subject:
    """Eager's cache would use the stale weight; without it, it does not."""
    model = nn.Linear(16, 16)

    def forward(x: Tensor) -> Any:
        y = model(x)
        with torch.no_grad():
            model.weight.mul_(2)
        return y, model(x.detach())

    def drive(program: Program, x: Tensor) -> Any:
        with torch.no_grad():
            return [program(x), program(x)]

    return Subject(forward, (torch.randn(4, 16),), module=model, drive=drive, cache_enabled=False)


@case()
def aliasing_outputs() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        y = model(x)
        return y, y, x, x.view(16, 4), y.view(16, 4), y[0], (x.T, {"y": y.detach()}), None, 3

    return Subject(forward, (leaf(4, 16),), module=model)


def check_aliases(program: Program, x: Tensor) -> Any:
    """Returns which outputs share memory with which, as numbers."""
    outputs = program(x)
    pointers = [t.untyped_storage().data_ptr() for t in outputs]
    first = {pointer: i for i, pointer in reversed(list(enumerate(pointers)))}
    return outputs, [first[pointer] for pointer in pointers], outputs[0] is outputs[1]


@case(Way.AMBIENT)
def aliases_stay_aliases() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        y = model(x)
        return y, y, y.view(16, 4), x.view(16, 4), x[1:], y.clone()

    return Subject(forward, (leaf(4, 16),), module=model, drive=check_aliases)


@case()
def parameter_returned() -> Subject:
    model = nn.Linear(16, 16)
    return Subject(
        lambda x: (model(x), model.weight, model.weight.t()), (leaf(4, 16),), module=model
    )


# Graph breaks


@case()
def graph_break_in_the_middle() -> Subject:
    first, second = mlp(), mlp()

    def forward(x: Tensor) -> Any:
        y = first(x)
        torch._dynamo.graph_break()
        return second(y) + first(y)

    return Subject(forward, (leaf(4, 16),), module=nn.ModuleList([first, second]))


@case()
def graph_break_inside_a_region() -> Subject:
    model, other = mlp(), mlp()

    def forward(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            y = model(x * 2)
            torch._dynamo.graph_break()
            z = model(y)
        return other(z.float())

    return Subject(forward, (leaf(4, 16),), module=nn.ModuleList([model, other]))


@case()
def graph_break_inside_a_disabled_region() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            y = model(x)
            torch._dynamo.graph_break()
            z = model(y)
        return model(z)

    return Subject(forward, (leaf(4, 16),), module=model)


@case()
def graph_break_in_a_loop() -> Subject:
    model = mlp()

    def step(x: Tensor) -> Any:
        y = model(x)
        torch._dynamo.graph_break()
        return y.softmax(-1)

    def forward(x: Tensor) -> Any:
        for _ in range(3):
            x = step(x)
            torch._dynamo.graph_break()
        return x

    return Subject(forward, (leaf(4, 16),), module=model)


@case()
def disabled_function() -> Subject:
    model = mlp()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def opaque(x: Tensor) -> Any:
        return model(x)

    def forward(x: Tensor) -> Any:
        return model(opaque(model(x)))

    return Subject(forward, (leaf(4, 16),), module=model)


# Shapes and modes


def several_batch_sizes(program: Program, x: Tensor) -> list[Any]:
    return [program(x[:size]) for size in (4, 7, 3, 1, 7)]


@case(dynamic=True)
def dynamic_shapes() -> Subject:
    return Subject(mlp(), (leaf(8, 16),), drive=several_batch_sizes)


@case()
def shapes_that_turn_dynamic() -> Subject:
    return Subject(Block(16, 2), (leaf(8, 5, 16),), drive=several_batch_sizes)


@case(dynamic=True)
def dynamic_decoder() -> Subject:
    def drive(program: Program, tokens: Tensor) -> list[Any]:
        return [program(tokens[:, :length]) for length in (12, 9, 5)]

    return Subject(Decoder(), (torch.randint(50, (2, 12)),), drive=drive)


@case()
def marked_dynamic() -> Subject:
    model = mlp()

    def drive(program: Program, x: Tensor) -> list[Any]:
        outputs = []
        for size in (4, 7):
            part = x.detach()[:size].clone()
            torch._dynamo.mark_dynamic(part, 0)
            outputs.append(program(part))
        return outputs

    return Subject(
        lambda x: (model(x).view(-1, 8), x.shape[0]), (torch.randn(8, 16),), model, drive=drive
    )


@case()
def no_grad_then_grad() -> Subject:
    def drive(program: Program, x: Tensor) -> list[Any]:
        with torch.no_grad():
            first = program(x)
        return [first, program(x)]

    return Subject(mlp(), (leaf(4, 16),), drive=drive)


@case()
def grad_then_inference_mode() -> Subject:
    def drive(program: Program, x: Tensor) -> list[Any]:
        first = program(x)
        with torch.inference_mode():
            return [first, program(x).clone()]

    return Subject(mlp(), (leaf(4, 16),), drive=drive)


@case()
def inference_mode_only() -> Subject:
    model = nn.Sequential(resnet()).eval()

    def drive(program: Program, x: Tensor) -> list[Any]:
        with torch.inference_mode():
            return [program(x), program(x)]

    return Subject(model, (torch.randn(2, 3, 16, 16),), drive=drive)


@case()
def no_grad_inside() -> Subject:
    model = mlp()

    def forward(x: Tensor) -> Any:
        with torch.no_grad():
            y = model(x)
        z = model(y)
        with torch.no_grad():
            return model(x) + z.detach(), z

    return Subject(forward, (leaf(4, 16),), module=model)


@case()
def train_then_eval() -> Subject:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))

    def drive(program: Program, x: Tensor) -> list[Any]:
        model.train()
        first = program(x)
        model.eval()
        return [first, program(x)]

    return Subject(model, (leaf(4, 16),), drive=drive)


@case()
def dropout() -> Subject:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.3))
    return Subject(model, (leaf(4, 16),), drive=twice)


@case()
def gradient_penalty() -> Subject:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def drive(program: Program, x: Tensor) -> Any:
        y = program(x)
        (grad,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        return y, grad.square().sum()

    return Subject(model, (leaf(4, 16),), drive=drive)


# Losses and other families


@case()
def cross_entropy_losses() -> Subject:
    model = nn.Linear(16, 5)
    weight = torch.rand(5)

    def forward(x: Tensor, target: Tensor, soft: Tensor) -> Any:
        logits = model(x)
        return (
            F.cross_entropy(logits, target),
            F.cross_entropy(logits, target, weight, label_smoothing=0.1),
            F.cross_entropy(logits, soft),
            F.nll_loss(logits.log_softmax(-1), target),
            F.kl_div(logits.log_softmax(-1), soft, reduction="batchmean"),
            F.binary_cross_entropy_with_logits(logits, soft),
            F.mse_loss(logits, soft) + F.l1_loss(logits, soft) + F.smooth_l1_loss(logits, soft),
        )

    args = (leaf(4, 16), torch.randint(5, (4,)), torch.rand(4, 5).softmax(-1))
    return Subject(forward, args, module=model)


@case()
def normalisations() -> Subject:
    model = nn.ModuleList([nn.LayerNorm(16), nn.RMSNorm(16), nn.GroupNorm(4, 8)])
    model.append(nn.InstanceNorm1d(8, affine=True))

    def forward(x: Tensor, w: Tensor) -> Any:
        y = x @ w
        return [layer(y) for layer in model] + [F.normalize(y), y.norm(), y.var(-1)]

    return Subject(forward, (leaf(2, 8, 16), leaf(16, 16)), module=model)


@case()
def embedding_bag() -> Subject:
    model = nn.ModuleList([nn.EmbeddingBag(20, 16, mode="sum"), nn.Linear(16, 4)])

    def forward(tokens: Tensor) -> Any:
        return model[1](model[0](tokens))

    return Subject(forward, (torch.randint(20, (4, 3)),), module=model)


@case()
def complex_numbers() -> Subject:
    def forward(x: Tensor, w: Tensor) -> Any:
        spectrum = torch.fft.rfft(torch.mm(x, w).float())
        mixed = spectrum @ spectrum.mH
        return mixed, torch.fft.irfft(spectrum) @ w

    return Subject(forward, (leaf(4, 16), leaf(16, 16)))


@case()
def linear_algebra() -> Subject:
    def forward(x: Tensor) -> Any:
        gram = torch.mm(x.mT, x).float() + torch.eye(8)
        return torch.linalg.cholesky(gram), torch.linalg.solve(gram, x.mT), torch.logdet(gram)

    return Subject(forward, (leaf(16, 8),))


@case()
def mixture_of_experts() -> Subject:
    experts, gate = nn.ModuleList(mlp() for _ in range(3)), nn.Linear(16, 3)

    def forward(x: Tensor) -> Any:
        weights, chosen = gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(experts):
            scale = (weights * (chosen == i)).sum(-1, keepdim=True)
            out = out + scale * expert(x)
        return out, torch.stack([e[2](x.repeat(1, 2)) for e in experts]).amax(0)  # type: ignore[index]

    return Subject(forward, (leaf(8, 16),), module=nn.ModuleList([*experts, gate]))


@case()
def indexing_and_scatter() -> Subject:
    def forward(x: Tensor, w: Tensor, index: Tensor) -> Any:
        y = x @ w
        z = torch.zeros(8, 16, dtype=y.dtype).index_add(0, index, y[index])
        out = x.new_zeros(8, 16)
        out[index] = (y.float() * 2)[index]
        return z, out, y.gather(1, index[:, None]), torch.where(y > 0, y, x), y.sort(-1)

    return Subject(forward, (leaf(8, 16), leaf(16, 16), torch.arange(8).flip(0)))


@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    [
        exceptions.param(
            exceptions.MODELS, name, way, dtype, id=f"{name}-{way.value}-{dtype_name(dtype)}"
        )
        for name, case in CASES.items()
        for way in case.ways
        for dtype in LOW_DTYPES
    ],
)
def test_model(name: str, way: Way, dtype: torch.dtype) -> None:
    chosen = CASES[name]

    def build() -> Subject:
        torch.manual_seed(oracle.SEED)
        return chosen.build()

    found = oracle.check(build, way, dtype, **chosen.compile_options)
    assert found is None, found


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=dtype_name)
def test_mask_constant_baked_as_float32_does_not_overflow(dtype: torch.dtype) -> None:
    """Eager autocast would look at ``scores.dtype``; bare capture bakes float32's minimum in."""
    torch.manual_seed(oracle.SEED)
    x = leaf(4, 4)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()

    def forward(x: Tensor, mask: Tensor) -> Tensor:
        scores = x @ x.mT
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) @ x

    actual = oracle.compile_amp_fx(forward, Way.BARE, dtype)(x, mask)
    with torch.autocast("cpu", dtype):
        expected = forward(x, mask)
    assert actual.dtype == torch.float32
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, expected.float(), rtol=2e-2, atol=2e-2)


INDUCTOR_CASES = (
    "decoder_only_with_tied_weights_and_loss",
    "resnet_and_its_running_stats",
    "autograd_function",
    "unet",
    "lstm_cell",
)


def errors(exact: oracle.Result, result: oracle.Result) -> list[float]:
    """The largest error of each output and gradient, relative to the largest number in it."""
    assert exact.grads is not None
    assert result.grads is not None
    pairs = [*zip(exact.outputs, result.outputs, strict=True)]
    pairs += zip(exact.grads, result.grads, strict=True)
    return [
        float((a - b.double()).abs().max() / (a.abs().max() + 1e-12))
        for a, b in pairs
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
@pytest.mark.parametrize("name", INDUCTOR_CASES)
def test_inductor_errs_no_more_than_native(name: str, way: Way) -> None:
    """Errors against float64 stay within twice those of ``torch.compile`` under autocast."""
    dtype = torch.bfloat16

    def build(*, exact: bool = False) -> Subject:
        torch.manual_seed(oracle.SEED)
        subject = CASES[name].build()
        if exact:
            for module in (subject.program, subject.module):
                if isinstance(module, nn.Module):
                    module.double()
            subject.args = tuple(
                arg.detach().double().requires_grad_(arg.requires_grad)
                if arg.is_floating_point()
                else arg
                for arg in subject.args
            )
        return subject

    region = dtype if way is Way.AMBIENT else None
    exact = oracle.run(build(exact=True), None)
    oracle.reset()
    native = oracle.run(build(), dtype, torch.compile)
    oracle.reset()
    ours = oracle.run(
        build(), region, lambda f: oracle.compile_amp_fx(f, way, dtype, compiler="inductor")
    )
    for i, (found, allowed) in enumerate(
        zip(errors(exact, ours), errors(exact, native), strict=True)
    ):
        assert found <= 2 * allowed + 1e-2, f"leaf {i}: {found:g}, native {allowed:g}"
