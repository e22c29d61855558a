"""Regions inside of the program and around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.parity.cases import case, leaf, mlp
from tests.parity.models.recurrent import twice
from tests.parity.oracle import LOW_DTYPES, Subject, Way

if TYPE_CHECKING:
    from tests.parity.oracle import Program


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
