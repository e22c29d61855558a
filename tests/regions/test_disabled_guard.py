"""disabled_guard: ``torch.autocast(enabled=False)`` around what the bare backend compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_fx
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

bf16, f32 = torch.bfloat16, torch.float32


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(3, 4, generator=rng)


def run(call: Any, x: torch.Tensor, enabled: bool | None, region: Any) -> torch.Tensor:
    """A call in a region that is on or off, or in none."""
    if enabled is None:
        result: torch.Tensor = call(x)
        return result
    with region("cpu", dtype=bf16, enabled=enabled):
        return run(call, x, None, None)


@pytest.mark.parametrize("region", [torch.autocast, amp_fx.autocast], ids=["torch", "amp_fx"])
def test_a_program_is_switched_without_a_restart(
    region: Callable[..., Any], model: nn.Module, x: torch.Tensor
) -> None:
    """Enables and disables in every order, as ``autocast(enabled=args.amp)`` does."""
    call = compiled(model)
    low = run(model, x, True, region)
    full = model(x)
    assert not torch.equal(low.float(), full)
    expected = {None: low.float(), True: low, False: full}
    order = (False, None, False, True, None, True, False)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for enabled in order:
        actual = run(call, x, enabled, region)
        torch.testing.assert_close(actual, expected[enabled], rtol=0, atol=0)
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert num_graphs == len(expected)


def test_a_disabled_region_is_left_again_inside(model: nn.Module, x: torch.Tensor) -> None:
    call = compiled(model)
    with torch.autocast("cpu", enabled=False):
        low = run(call, x, True, torch.autocast)
        full = run(call, x, None, None)
    assert low.dtype == bf16
    torch.testing.assert_close(full, model(x), rtol=0, atol=0)


@torch.no_grad()  # Dynamo reads the .grad of what it resumes with
def test_a_function_that_is_called_in_a_disabled_region_of_the_program(
    model: nn.Module, x: torch.Tensor
) -> None:
    """After a graph break Dynamo compiles it alone, with the region around it."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        result: torch.Tensor = model(x)
        return result

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low = model(x)
        with torch.autocast("cpu", enabled=False):
            return low, inner(x)

    low, full = compiled(program)(x)
    torch.testing.assert_close(full, model(x), rtol=0, atol=0)
    torch.testing.assert_close(low, run(model, x, True, torch.autocast).float(), rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("enabled", [None, False, True])
def test_eager_checkpoints_recompute_as_the_forward_ran(
    enabled: bool | None, use_reentrant: bool, model: nn.Module, x: torch.Tensor
) -> None:
    """Recomputes in a disabled region, by which checkpoints restore a forward without autocast."""
    call = compiled(model)
    seen: list[tuple[torch.dtype, bool]] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = call(x)
        with torch.no_grad():
            seen.append((result.dtype, torch.equal(result, model(x))))
        return result.sin()  # a recomputation ends with what is saved last

    leaf = x.requires_grad_()
    result = run(
        lambda x: checkpoint(block, x, use_reentrant=use_reentrant), leaf, enabled, torch.autocast
    )
    torch.autograd.backward(result.sum())
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[0] == (bf16 if enabled else f32, enabled is not None)
