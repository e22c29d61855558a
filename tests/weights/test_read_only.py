"""Compiled code never writes to weights and cached values, and never returns them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests import needs
from tests.weights.nets import random

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., Any]

COMPILERS = ["aot_eager", pytest.param("inductor", marks=needs.CPP_COMPILER)]
SIZE = 16


class Program(nn.Module):
    """A function of some parameters and buffers, which are square."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.v = nn.Parameter(random(SIZE, SIZE, seed=1) / SIZE**0.5)
        self.w = nn.Parameter(random(SIZE, SIZE, seed=2) / SIZE**0.5)
        self.mask: torch.Tensor
        self.register_buffer("mask", (random(SIZE, SIZE, seed=3) > 0).float())

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


class SavedAsGradient(torch.autograd.Function):
    """A function whose gradient is a tensor that it saves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(other)
        return x * 2 + other

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (*ctx.saved_tensors, None)


saved_as_gradient: Function = SavedAsGradient.apply

SAVED: dict[str, Function] = {
    # The backward multiplies a gradient by the saved value, in a kernel that could be in place.
    "mask": lambda m, x: nn.functional.linear(x, m.w * (1 - m.mask)),
    "tanh": lambda m, x: nn.functional.linear(x, m.w.tanh()),
    "exp": lambda m, x: nn.functional.linear(x, m.w.exp()),
    "view of a mask": lambda m, x: x @ (m.w * (1 - m.mask).t()),
    "several": lambda m, x: (x @ (m.w * (1 - m.mask)).tanh()) @ (m.v * m.mask.exp()),
    "saved as a gradient": lambda m, x: saved_as_gradient(x, m.mask.cumsum(0)) @ m.w,
}
"""Programs whose backward reads cached values."""


@pytest.mark.parametrize("numerics", [None, "eager"])
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", SAVED)
def test_backward_does_not_write_values_that_the_forward_saves(
    name: str, compiler: str, numerics: str | None
) -> None:
    program = Program(SAVED[name])
    twin = copy.deepcopy(program)
    options: dict[str, Any] = {"compiler": compiler, "weight_cache": "training"}
    options |= {} if numerics is None else {"numerics": numerics}
    compiled = torch.compile(program, backend="amp_fx", options=options)
    x = random(SIZE, SIZE, seed=4).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = twin(x)
    expected = [expected, *torch.autograd.grad(expected.float().sum(), [x, twin.w])]
    for _ in range(3):
        actual = compiled(x)
        actual = [actual, *torch.autograd.grad(actual.sum(), [x, program.w])]
        torch.testing.assert_close(
            actual, expected, rtol=3e-2, atol=3e-2, check_dtype=False, check_stride=False
        )
        for gradient in actual[1:]:
            gradient.zero_()  # a caller owns its gradients
