"""Ops whose kernels accept no low dtype run in float32 where the program asks for no autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

Restore = Callable[[Tensor], Any]
OPS: dict[str, Callable[[Tensor, Restore], Any]] = {
    "a special function": lambda h, restore: torch.special.erfcx(restore(h)),
    "a function of positive numbers": lambda h, restore: torch.special.ndtri(restore(h.sigmoid())),
    "distances": lambda h, restore: functional.pdist(restore(h)),
    "random numbers": lambda h, restore: torch.distributions.Gamma(restore(h.exp()), 1).rsample(),
    "ops around it": lambda h, restore: (torch.special.erfcx(restore(h + h)) @ h).relu(),
}
"""Programs of a low tensor. The second argument casts it to float32 where a kernel needs this."""


class Net(nn.Module):
    def __init__(self, name: str, restore: Restore) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.op, self.restore = OPS[name], restore

    def forward(self, x: Tensor) -> Any:
        product = self.linear(x)
        return product, self.op(product, self.restore)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", OPS)
def test_without_a_region(name: str, compiler: str) -> None:
    x = torch.rand(4, 4)
    options: dict[str, Any] = {"compiler": compiler, "output_dtype": "autocast"}
    compiled = torch.compile(Net(name, torch.Tensor.clone), backend="amp_fx", options=options)
    reference = Net(name, torch.Tensor.float)
    torch.manual_seed(1)
    found = compiled(x)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = reference(x)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_in_a_region_they_raise_as_in_eager_code() -> None:
    net = Net("a special function", torch.Tensor.clone)
    compiled = torch.compile(net, backend="amp_fx", options={"compiler": "eager"})
    for call in (net, compiled):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(NotImplementedError, match="erf"):
            call(torch.rand(4, 4))


@pytest.mark.falls_back
def test_transforms_run_in_float32() -> None:
    x = torch.rand(4, 4)

    def program(row: Tensor) -> Any:
        return torch.special.erfcx(x @ row)

    with torch.autocast("cpu", torch.bfloat16), pytest.raises(NotImplementedError, match="erf"):
        torch.vmap(program)(x)
    compiled = torch.compile(torch.vmap(program), backend="amp_fx", options={"compiler": "eager"})
    assert torch.equal(compiled(x), torch.vmap(program)(x))
