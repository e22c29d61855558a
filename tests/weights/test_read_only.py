"""``AMP_FX_CHECK=1`` finds compiled code that writes to cached values, or returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx.errors import StaleWeightError
from amp_fx.passes import pack_for_kernels, protect_saved_inputs
from amp_fx.weights.read_only import CHECK_ENVIRONMENT
from amp_fx.weights.store import STORE
from tests import needs
from tests.weights.nets import random

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., Any]

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


@needs.CPP_COMPILER
def test_check_finds_a_value_that_the_backward_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_ENVIRONMENT, "1")
    monkeypatch.setattr(protect_saved_inputs, "keep_saved", lambda _: None)
    program = Program(lambda m, x: nn.functional.linear(x, m.w * (1 - m.mask)))
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
    program = Program(lambda m, x: (x @ m.w, m.w.to(torch.float32, copy=True)))
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
