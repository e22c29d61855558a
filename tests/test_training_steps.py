"""Training steps compiled as one function: forward, backward and optimizer, against eager autocast.

Dynamo breaks the graph at ``backward()``. It compiles the rest of the step while a resume function
runs, and the backward at its first call.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import amp_fx
from tests.needs import CPP_COMPILER
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    Region = Callable[[], AbstractContextManager[Any]]
    Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

bf16 = torch.bfloat16

pytestmark = pytest.mark.filterwarnings(
    # Dynamo's, of optimizers and of the loss that it resumes with.
    "ignore:Profiler record function:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(functional.gelu(self.norm(self.first(x))))
        return result


@dataclasses.dataclass
class Program:
    """A model, and the region that its forward runs in."""

    region: Region
    net: Net = dataclasses.field(default_factory=Net)

    def loss(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with self.region():
            return functional.mse_loss(self.net(x), target)


def plain(program: Program) -> Step:
    optimizer = torch.optim.SGD(program.net.parameters(), lr=0.05, momentum=0.9)

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = program.loss(x, target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


def scaled(scaler_class: Any) -> Callable[[Program], Step]:
    def make(program: Program) -> Step:
        optimizer = torch.optim.SGD(program.net.parameters(), lr=0.05, momentum=0.9)
        # Overflows at first, and grows again.
        scaler = scaler_class("cpu", init_scale=2.0**127, growth_interval=3)

        def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            loss = program.loss(x, target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(program.net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        return step

    return make


def in_micro_batches(program: Program) -> Step:
    optimizer = torch.optim.SGD(program.net.parameters(), lr=0.05)

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for part, aim in zip(x.chunk(3), target.chunk(3), strict=True):
            loss = program.loss(part, aim) / 3
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def with_two_backwards(program: Program) -> Step:
    optimizer = torch.optim.SGD(program.net.parameters(), lr=0.05)

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = program.loss(x, target)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        (2 * loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


STEPS: dict[str, Callable[[Program], Step]] = {
    "plain": plain,
    "torch's scaler": scaled(torch.amp.GradScaler),
    "our scaler": scaled(amp_fx.GradScaler),
    "micro-batches": in_micro_batches,
    "two backwards": with_two_backwards,
}


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", bf16)


MODES: dict[str, tuple[Region, Region]] = {
    "bare": (contextlib.nullcontext, contextlib.nullcontext),
    "inside": (autocast, contextlib.nullcontext),
    "around": (contextlib.nullcontext, autocast),
}
"""Regions of the forward and of each call."""


def train(
    name: str, regions: tuple[Region, Region], wrap: Callable[[Step], Step], num_steps: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the losses in float32, and the weights at the end."""
    torch.manual_seed(0)
    region, around = regions
    program = Program(region)
    step = wrap(STEPS[name](program))
    losses = []
    for _ in range(num_steps):
        with around():
            loss = step(torch.randn(12, 8), torch.randn(12, 4))
        losses.append(loss.detach().float())
    return losses, [param.detach() for param in program.net.parameters()]


def check(name: str, mode: str, num_steps: int, *, compiler: str, **options: Any) -> None:
    """Fails unless a compiled step gives the bits of eager autocast."""
    eager_regions = MODES["inside" if mode == "bare" else mode]
    expected = train(name, eager_regions, lambda step: step, num_steps)

    def wrap(step: Step) -> Step:
        return compiled(step, compiler=compiler, **options)

    actual = train(name, MODES[mode], wrap, num_steps)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_losses_and_weights_are_those_of_eager_autocast(compiler: str, mode: str) -> None:
    check("plain", mode, 4, compiler=compiler)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in STEPS if name != "plain"])
def test_kinds_of_steps(name: str) -> None:
    check(name, "inside", 4, compiler="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", STEPS)
def test_a_hundred_steps(name: str, compiler: str, mode: str) -> None:
    check(name, mode, 100, compiler=compiler)


@CPP_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STEPS)
def test_inductor_in_all_steps(name: str, mode: str) -> None:
    check(name, mode, 10, compiler="inductor", numerics="eager")


def test_a_step_that_amp_fx_compiles() -> None:
    def wrap(step: Step) -> Step:
        return amp_fx.compile(step, options={"compiler": "aot_eager"})

    expected = train("plain", MODES["around"], lambda step: step, 4)
    actual = train("plain", MODES["bare"], wrap, 4)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
