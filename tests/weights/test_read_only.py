"""Compiled code never writes to weights and cached values, and never returns them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from amp_fx.errors import StaleWeightError
from amp_fx.passes import pack_for_kernels, protect_saved_inputs
from amp_fx.weights.read_only import CHECK_ENVIRONMENT
from amp_fx.weights.store import STORE
from tests import needs
from tests.weights.nets import assert_same, random

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


@pytest.mark.one_in(3)
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


def _convolution(m: Any, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    images = x.reshape(1, 1, SIZE, SIZE).contiguous(memory_format=torch.channels_last)
    weight = m.v[:1, :9].reshape(1, 1, 3, 3)
    return nn.functional.conv2d(images, weight, padding=1) + added.reshape(1, 1, SIZE, SIZE)


def _in_float32(function: Function) -> Function:
    def disabled(m: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return function(m, x)

    return lambda m, x: (disabled(m, x), x @ m.w)


RETURNED: dict[str, Function] = {
    "clone": lambda m, x: (x @ m.w, m.w.clone()),
    "concatenation": lambda m, x: (x @ m.w, torch.cat([m.w])),
    "copy": lambda m, x: (x @ m.w, m.w.to(torch.float32, copy=True)),
    "copies of an input": lambda m, x: (x @ m.w, x.to(torch.float32, copy=True), x.clone()),
    "view of a clone": lambda m, x: (x @ m.w, m.w.clone().t()),
    "cast": lambda m, x: (x @ m.w, m.w.bfloat16()),
    "value and its copy": lambda m, x: (x @ (m.w * m.mask), (m.w * m.mask).clone()),
    "part": lambda m, x: (x @ m.w, m.w[2:4].clone(), m.mask.clone()),
    "convolution and copies": lambda m, x: (
        _convolution(m, x, m.w),
        m.w.clone(),
        m.v.to(torch.float32, copy=True),
    ),
    "convolution + parameter": lambda m, x: (_convolution(m, x, m.w.bfloat16()),),
    "convolution + parameter in float32": _in_float32(lambda m, x: _convolution(m, x, m.w)),
    "convolution + value in float32": _in_float32(lambda m, x: _convolution(m, x, m.w.exp())),
    "convolution + view in float32": _in_float32(lambda m, x: _convolution(m, x, m.w.exp().t())),
    "float32 product": _in_float32(lambda m, x: (x @ m.w, m.w.clone())),
}
"""Programs without gradients that return copies of weights and of cached values, or add to them."""


@pytest.mark.parametrize("numerics", [None, pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", RETURNED)
@torch.no_grad()
def test_results_may_be_written(name: str, compiler: str, numerics: str | None) -> None:
    program = Program(RETURNED[name])
    twin = copy.deepcopy(program)
    options: dict[str, Any] = {"compiler": compiler}
    options |= {} if numerics is None else {"numerics": numerics}
    compiled = torch.compile(program, backend="amp_fx", options=options)
    x = random(SIZE, SIZE, seed=4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = twin(x.clone())
    for _ in range(3):
        actual = compiled(x)
        torch.testing.assert_close(
            actual, expected, rtol=3e-2, atol=3e-2, check_dtype=False, check_stride=False
        )
        for result in pytree.tree_leaves(actual):
            result.zero_()  # a caller owns its results
        assert_same(list(program.state_dict().values()), list(twin.state_dict().values()))


TIED: dict[str, Function] = {
    "products": lambda m, x: (x @ m.v).sin() + (x @ m.w).cos(),
    "elements": lambda m, x: (x @ m.mask) * m.v + x.sin() * m.w,
    "values": lambda m, x: (x @ m.mask) * m.v.exp() + x.sin() * m.w.exp(),
    "float32 products": _in_float32(lambda m, x: (x @ m.v).sin() + (x @ m.w).cos()),
}
"""Programs of two weights that share memory when they are compiled."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("numerics", [None, "eager"])
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", TIED)
@torch.no_grad()
def test_weights_that_shared_memory_are_not_merged(
    name: str, compiler: str, numerics: str | None
) -> None:
    program = Program(TIED[name])
    program.v.data = program.w.data
    options: dict[str, Any] = {"compiler": compiler}
    options |= {} if numerics is None else {"numerics": numerics}
    compiled = torch.compile(program, backend="amp_fx", options=options)
    x = random(SIZE, SIZE, seed=4)
    for seed in (5, 6):
        compiled(x)
        compiled(x)
        program.v.data = random(SIZE, SIZE, seed=seed)
        with torch.autocast("cpu", torch.bfloat16):
            expected = program(x)
        torch.testing.assert_close(
            compiled(x), expected, rtol=3e-2, atol=5e-2, check_dtype=False, check_stride=False
        )


@needs.CPP_COMPILER
def test_check_finds_a_value_that_the_backward_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_ENVIRONMENT, "1")
    monkeypatch.setattr(protect_saved_inputs, "keep_saved", lambda _: None)
    program = Program(SAVED["mask"])
    options: dict[str, Any] = {"numerics": "eager"}
    compiled = torch.compile(program, backend="amp_fx", options=options)
    x = random(SIZE, SIZE, seed=4)
    with pytest.raises(StaleWeightError, match=r"backward of .*cached value of mask"):
        compiled(x).sum().backward()


@needs.CPP_COMPILER
@torch.no_grad()
def test_check_finds_a_weight_that_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_ENVIRONMENT, "1")
    monkeypatch.setattr(pack_for_kernels, "_separate_outputs", lambda *_: None)
    program = Program(RETURNED["copy"])
    compiled = torch.compile(program, backend="amp_fx")
    x = random(SIZE, SIZE, seed=4)
    with pytest.raises(StaleWeightError, match="returned memory of w as result 1"):
        compiled(x)


@torch.no_grad()
def test_check_finds_a_value_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_ENVIRONMENT, "1")
    program = Program(lambda m, x: x @ (m.w * m.mask))
    compiled = torch.compile(program, backend="amp_fx", options={"compiler": "aot_eager"})
    x = random(SIZE, SIZE, seed=4)
    compiled(x)
    [entry] = [e for e in STORE.entries.values() if e.spec.names == ("w", "mask")]
    entry.value.add_(1)
    with pytest.raises(StaleWeightError, match=r"since the latest call wrote .* w, mask of"):
        compiled(x)
    compiled(x)
