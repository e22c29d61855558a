"""Weights and inputs: tied, frozen, of other dtypes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn

from tests.parity.cases import case, leaf, mlp
from tests.parity.oracle import Subject, Way


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
