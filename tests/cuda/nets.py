"""Small models whose generated code is executed, and what a run of one leaves behind."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.blocks import Block, LlamaBlock, T5Block, UNetBlock

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 0

Tensors = dict[str, Tensor]
"""Outputs, gradients and buffers of a run, by name, on the host."""


class ResNet(nn.Module):
    """A convolution, a residual block with batch norms, and a head.

    It has no ReLU, whose gradient jumps where rounding changes a sign, and more than eight
    channels: inductor writes frozen tensors of up to eight numbers into kernels, and then fuses
    other ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Sequential(
            nn.BatchNorm2d(16),
            nn.SiLU(),
            nn.Conv2d(16, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = functional.silu(x + self.body(x))
        found: Tensor = self.head(x.mean((2, 3)))
        return found


class TiedHead(nn.Module):
    """An embedding whose weight is the head's too, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.middle = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[..., 0].abs() * 7).long() % 40
        hidden = torch.tanh(self.middle(self.embedding(tokens)))
        logits = functional.linear(hidden, self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def mlp(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(48, 96), nn.GELU(), *more, nn.LayerNorm(96), nn.Linear(96, 16))


@dataclasses.dataclass(frozen=True)
class Net:
    """A model to be built, and the shape of its input."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def made(self) -> tuple[nn.Module, Tensor]:
        """The model and an input that requires grad, on the device, the same on every call."""
        torch.manual_seed(SEED)
        model = self.build()
        x = torch.randn(self.shape)
        return model.cuda(), x.cuda().requires_grad_()


NETS = {
    "mlp": Net(mlp, (24, 48)),
    "dropout": Net(lambda: mlp(nn.Dropout(0.3)), (24, 48)),
    "attention": Net(lambda: Block(32, 2, is_causal=True), (2, 16, 32)),
    "vit": Net(lambda: Block(32, 2, is_causal=False), (2, 17, 32)),
    "llama": Net(lambda: LlamaBlock(32, 2, 64), (2, 16, 32)),
    "t5": Net(lambda: T5Block(32, 2, 64, 16), (2, 16, 32)),
    "resnet": Net(ResNet, (2, 3, 8, 8)),
    "unet": Net(lambda: UNetBlock(32), (1, 32, 8, 8)),
    "tied head": Net(TiedHead, (3, 8, 4)),
}


def differing(left: Tensors, right: Tensors) -> list[str]:
    """Returns the names of tensors that differ in dtype or bits."""
    assert left.keys() == right.keys()
    return [name for name, tensor in left.items() if not is_same(tensor, right[name])]


def distances(left: Tensors, right: Tensors) -> dict[str, float]:
    """Returns the largest differences, relative to the largest number of each tensor on the right.

    Fails if dtypes differ.
    """
    assert {n: t.dtype for n, t in left.items()} == {n: t.dtype for n, t in right.items()}
    return {name: distance(tensor, right[name]) for name, tensor in left.items()}


def is_same(left: Tensor, right: Tensor) -> bool:
    """Returns True if two tensors have the same dtype and bits."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.nan_to_num(), right.nan_to_num())


def distance(left: Tensor, right: Tensor) -> float:
    """Returns the largest difference, relative to the largest number on the right."""
    largest = right.double().abs().max().clamp_min(1e-30)
    return float((left.double() - right.double()).abs().max() / largest)


def run(
    net: Net,
    compile_: Callable[[nn.Module], Any],
    dtype: torch.dtype,
    *,
    is_trained: bool = True,
    num_calls: int = 2,
) -> Tensors:
    """Calls a model under autocast, each time with an update of its weights before but the first.

    Args:
        net: The model.
        compile_: Makes of it what is called.
        dtype: Of the region.
        is_trained: Whether gradients are taken; else it is in evaluation mode.
        num_calls: How many calls.
    """
    torch._dynamo.reset()
    model, x = net.made()
    model.train(is_trained)
    program = compile_(model)
    found: Tensors = {}
    for call in range(num_calls):
        if call:
            _update(model)
        model.zero_grad()
        x.grad = None
        torch.cuda.manual_seed(SEED + call)
        with torch.set_grad_enabled(is_trained), torch.autocast("cuda", dtype):
            out = program(x)
        found[f"{call} output"] = out.detach().cpu()
        if is_trained:
            (3 * out.float()).square().mean().backward()
            named = [*model.named_parameters(), ("input", x)]
            found |= {f"{call} grad of {n}": p.grad.cpu() for n, p in named if p.grad is not None}
    found |= {f"buffer {name}": buffer.cpu() for name, buffer in model.named_buffers()}
    return found


def _update(model: nn.Module) -> None:
    """Writes to every weight in place, as a step does: kept copies are stale."""
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.75)
