"""Mutation and aliasing."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.parity.cases import case, leaf, mlp
from tests.parity.models.recurrent import twice
from tests.parity.oracle import Subject, Way

if TYPE_CHECKING:
    from tests.parity.oracle import Program


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
