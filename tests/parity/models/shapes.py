"""Shapes that change, and grad modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.models.explained import Block, Size
from tests.parity.cases import case, leaf, mlp
from tests.parity.models.recurrent import resnet, twice
from tests.parity.models.transformers import Decoder
from tests.parity.oracle import Subject

if TYPE_CHECKING:
    from tests.parity.oracle import Program


def several_batch_sizes(program: Program, x: Tensor) -> list[Any]:
    return [program(x[:size]) for size in (4, 7, 3, 1, 7)]


@case(dynamic=True)
def dynamic_shapes() -> Subject:
    return Subject(mlp(), (leaf(8, 16),), drive=several_batch_sizes)


@case()
def shapes_that_turn_dynamic() -> Subject:
    block = Block(Size(width=16, depth=1, heads=2, context=5))
    return Subject(block, (leaf(8, 5, 16),), drive=several_batch_sizes)


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
