"""The three ways in which weights' values are kept, and an oracle that touches no weight.

All through what users see: ``torch.compile``, and ``weight_cache`` for what is kept.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from amp_fx import weight_cache
from tests.weights.nets import random

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Program = Callable[..., torch.Tensor]
    Inside = Callable[[torch.Tensor], torch.Tensor]

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
            out.sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            return out.detach(), x.grad

    def warm(self, program: Program, x: torch.Tensor) -> None:
        """Calls until values are cached."""
        assert self.keeps_values(program, x), "nothing is kept: there is nothing to test"

    def keeps_values(self, program: Program, x: torch.Tensor) -> bool:
        """Calls several times; returns True if values are cached then."""
        for _ in range(4):
            self.call(program, x)
        return weight_cache.stats().bytes > 0


FROZEN = Way("frozen")
KEPT = Way("kept", (("freezing", False),))
TRAINED = Way("trained", (("weight_cache", "training"),), is_trained=True)
WAYS = (FROZEN, KEPT, TRAINED)


class Line(nn.Module):
    """Linear layers without anything in between: each element of each weight counts.

    Args:
        weights: Their contents, which are copied.
        inside: What happens to the activations after each layer, by position.
    """

    def __init__(
        self, weights: Iterable[torch.Tensor], inside: dict[int, Inside] | None = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.inside = inside or {}
        for weight in weights:
            layer = nn.Linear(weight.shape[0], weight.shape[1], bias=False)
            layer.weight.data.copy_(weight)
            self.layers.append(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x
        for i, layer in enumerate(self.layers):
            out = layer(out)
            if i in self.inside:
                out = self.inside[i](out)
        return out

    def weight(self, i: int) -> nn.Parameter:
        """Returns the current weight of a layer."""
        weight = self.layers[i].weight
        assert isinstance(weight, nn.Parameter)
        return weight


def contents(seed: int, size: int = SIZE) -> torch.Tensor:
    """Returns contents of a weight, which differ between seeds."""
    scaled: torch.Tensor = random(size, size, seed=seed) / size**0.5
    return scaled


def make_line(num_layers: int = 3, **kwargs: Any) -> tuple[Line, list[torch.Tensor]]:
    """Returns a model, and what its weights hold."""
    held = [contents(seed) for seed in range(num_layers)]
    return Line(held, **kwargs), held


def batch(size: int = SIZE) -> torch.Tensor:
    return random(4, size, seed=99)


def expected(
    held: Sequence[torch.Tensor], x: torch.Tensor, *, is_trained: bool
) -> tuple[torch.Tensor, ...]:
    """Computes the result of eager autocast from plain tensors, without reading a weight."""
    x = x.detach().clone().requires_grad_(is_trained)
    with torch.autocast("cpu", torch.bfloat16):
        out = x
        for weight in held:
            out = functional.linear(out, weight)
    if not is_trained:
        return (out.float(),)
    return out.detach().float(), torch.autograd.grad(out.float().sum(), x)[0]


def error_of(actual: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Returns the greatest distance of two results, relative to what is wanted."""
    pairs = zip(actual, wanted, strict=True)
    return max(
        (a - w).abs().max().item() / (w.square().mean().sqrt().item() or 1.0) for a, w in pairs
    )


def is_right(way: Way, program: Program, held: Sequence[torch.Tensor], x: torch.Tensor) -> bool:
    """Calls once: whether what comes is made of what the weights hold."""
    wanted = expected(held, x, is_trained=way.is_trained)
    return error_of(way.call(program, x), wanted) < TOLERANCE


def check(way: Way, program: Program, held: Sequence[torch.Tensor], x: torch.Tensor) -> None:
    """Calls once, and compares with the oracle."""
    wanted = expected(held, x, is_trained=way.is_trained)
    error = error_of(way.call(program, x), wanted)
    assert error < TOLERANCE, f"off by {error:.2g} of what is expected"


def weak(tensor: torch.Tensor) -> StorageWeakRef:
    """Tells whether a storage lives, without keeping it alive."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def num_alive(storages: Iterable[StorageWeakRef]) -> int:
    """Returns the number of storages that have not been freed."""
    gc.collect()
    return sum(not storage.expired() for storage in storages)  # type: ignore[no-untyped-call]
