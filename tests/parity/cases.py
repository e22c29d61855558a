"""Cases of model parity: a function that builds a subject, and the options of its compilation."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.parity.oracle import Subject, Way

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass
class Case:
    """A subject to be built, and how it is compiled."""

    build: Callable[[], Subject]
    ways: tuple[Way, ...] = tuple(Way)
    compile_options: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES: dict[str, Case] = {}


def case(
    *ways: Way, **compile_options: Any
) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    """Register a builder under its name; for both ways unless some are given."""

    def register(build: Callable[[], Subject]) -> Callable[[], Subject]:
        CASES[build.__name__] = Case(build, ways or tuple(Way), compile_options)
        return build

    return register


def leaf(*shape: int) -> Tensor:
    """Returns a random input that requires grad."""
    return torch.randn(*shape, requires_grad=True)


def mlp(width: int = 16, out: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, out))
