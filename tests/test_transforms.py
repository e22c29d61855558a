"""transforms: ``torch.vmap`` and its like, called from eager code on compiled programs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.backend import transforms
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

bf16, f32 = torch.bfloat16, torch.float32


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def in_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", bf16):
        result: torch.Tensor = model(x)
    return result


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda call, x: torch.vmap(call)(x[None]),
    "grad": lambda call, x: torch.func.grad(lambda t: call(t).sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_later_plain_calls_are_compiled(
    name: str, model: nn.Module, rng: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(3, 4, generator=rng)
    call = compiled(model)
    transforms._warned.clear()
    for _ in range(2):
        found = TRANSFORMS[name](call, x)
    torch.testing.assert_close(found, TRANSFORMS[name](model, x), rtol=0, atol=0)
    expected = in_autocast(model, x).float()
    assert not torch.equal(expected, model(x))
    for _ in range(2):
        torch.testing.assert_close(call(x), expected, rtol=0, atol=0)
    [message] = warnings_in(caplog)
    assert "Compile the function that calls the transform" in message


def test_a_transform_in_the_region_of_compile(model: nn.Module, rng: torch.Generator) -> None:
    x = torch.randn(3, 4, generator=rng)
    call = amp_fx.compile(model, options={"compiler": "eager"})
    torch.vmap(call)(x)
    torch.testing.assert_close(call(x), in_autocast(model, x), rtol=0, atol=0)


def test_a_transform_that_is_compiled_itself_is_no_matter(
    model: nn.Module, rng: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(3, 4, generator=rng)
    transforms._warned.clear()
    call = compiled(torch.vmap(model))
    assert torch.equal(call(x), in_autocast(torch.vmap(model), x).float())  # type: ignore[arg-type]
    assert not warnings_in(caplog)


def test_fullgraph_has_torchs_own_error(model: nn.Module, rng: torch.Generator) -> None:
    call = torch.compile(model, backend="amp_fx", fullgraph=True, options={"compiler": "eager"})
    with pytest.raises(RuntimeError, match=r"torch\.func\.vmap"):
        torch.vmap(call)(torch.randn(3, 4, generator=rng))


def test_other_backends_are_left_alone(model: nn.Module, rng: torch.Generator) -> None:
    x = torch.randn(3, 4, generator=rng)
    num_graphs = 0

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return gm.forward

    call = torch.compile(model, backend=backend)
    torch.vmap(call)(x)
    call(x)
    assert num_graphs == 0, "torch compiles it by now: transforms.py has nothing left to do"
