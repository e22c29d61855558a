"""Ways in which values of weights are kept, and linear layers to compare with eager autocast.

All through what users see: ``torch.compile``, and ``weight_cache`` for what is kept.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_fx import weight_cache
from tests.weights.nets import random

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Program = Callable[..., torch.Tensor]

SIZE = 32
TOLERANCE = 0.05
"""Relative, of whole outputs: bfloat16 rounds by less, and a stale row is off by far more."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of keeping what is computed from weights.

    Attributes:
        name: Of the test's case.
        options: Of the backend.
        is_trained: Whether calls record gradients, and run them.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    is_trained: bool = False

    def compile(self, model: nn.Module) -> Program:
        program: Program = torch.compile(
            model, backend="amp_fx", options=dict(self.options) or None, dynamic=False
        )
        return program

    def call(self, program: Program, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the output, and in training the gradient of the input."""
        with torch.set_grad_enabled(self.is_trained):
            if not self.is_trained:
                return (program(x),)
            x = x.detach().clone().requires_grad_()
            out = program(x)
            return out.detach(), torch.autograd.grad(out.sum(), x)[0]

    def warm(self, program: Program, x: torch.Tensor) -> None:
        """Calls until values are cached."""
        for _ in range(4):
            self.call(program, x)
        assert weight_cache.stats().bytes, "nothing is kept: there is nothing to test"

    def check(self, program: Program, model: nn.Module, x: torch.Tensor) -> None:
        """Calls once, and compares with eager autocast."""

        def eager(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out: torch.Tensor = model(x).float()
            return out

        error = error_of(self.call(program, x), self.call(eager, x))
        assert error < TOLERANCE, f"off by {error:.2g} of what is expected"


FROZEN = Way("frozen")
KEPT = Way("kept", (("freezing", False),))
TRAINED = Way("trained", (("weight_cache", "training"),), is_trained=True)
WAYS = (FROZEN, KEPT, TRAINED)


class Line(nn.Sequential):
    """Linear layers without anything in between: each element of each weight counts."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(num_layers)))
        for i, weight in enumerate(self.parameters()):
            weight.data.copy_(contents(i))

    def weight(self, i: int) -> nn.Parameter:
        """Returns the current weight of a layer."""
        return self.get_parameter(f"{i}.weight")


def contents(seed: int) -> torch.Tensor:
    """Returns contents of a weight, which differ between seeds."""
    scaled: torch.Tensor = random(SIZE, SIZE, seed=seed) / SIZE**0.5
    return scaled


def batch() -> torch.Tensor:
    return random(4, SIZE, seed=99)


def error_of(actual: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Returns the greatest distance of two results, relative to what is wanted."""
    pairs = zip(actual, wanted, strict=True)
    return max(
        (a - w).abs().max().item() / (w.square().mean().sqrt().item() or 1.0) for a, w in pairs
    )
