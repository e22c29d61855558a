"""policy_mode: the policy of a region, and how Dynamo captures it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

import amp_fx
from amp_fx import Policy
from amp_fx.graphs.policy_mode import ambient_policy
from tests.other_thread import compiling_elsewhere

bf16, f32 = torch.bfloat16, torch.float32
WIDE = Policy.default().with_ops({"matmul": "fp32"})
LOW = Policy.default().with_ops({"aten::sin": "lower_precision_fp"})

OTHER_BACKEND = pytest.mark.filterwarnings("ignore:'forward':amp_fx.errors.PolicyWarning")
"""Its graphs run eagerly in the region."""


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 4, generator=rng).requires_grad_()


def test_a_region_keeps_no_policy_alive() -> None:
    found = []
    for index in range(3):
        policy = Policy.default().with_modules({f"layer{index}": "fp32"})
        found.append(weakref.ref(policy))
        with amp_fx.autocast("cpu", policy=policy):
            assert ambient_policy() is policy
    del policy
    gc.collect()
    assert [policy() for policy in found] == [None] * 3


def test_a_checkpoint_keeps_the_policy_of_its_forward(x: torch.Tensor) -> None:
    """Recomputes after the region has ended, when nothing else has the policy."""
    seen: list[Policy | None] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(ambient_policy())
        return x.exp()

    with amp_fx.autocast("cpu", policy=Policy.default().with_ops({"linear": "fp32"})):
        out = torch.utils.checkpoint.checkpoint(look, x, use_reentrant=False)
    gc.collect()
    assert out is not None
    torch.autograd.backward(out.sum())
    assert len(seen) == 2
    assert seen[0] == seen[1] is not None


def test_without_a_policy_there_is_no_mode() -> None:
    with amp_fx.autocast("cpu"):
        assert _get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]


@OTHER_BACKEND
def test_a_backend_learns_the_policy_around_it(x: torch.Tensor) -> None:
    """Relies on where Dynamo puts the function modes while it compiles."""
    seen: list[Policy | None] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(ambient_policy())
        return gm.forward

    call = torch.compile(lambda x: x @ x, backend=backend)
    with amp_fx.autocast("cpu", policy=LOW), amp_fx.autocast("cpu", policy=WIDE):
        call(x)
    call(x)
    assert seen == [WIDE, None]


def test_the_policy_of_a_thread_that_compiles_is_its_own() -> None:
    with compiling_elsewhere(WIDE):
        assert ambient_policy() is None


def test_nested_regions_are_captured_with_the_innermost_policy(x: torch.Tensor) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with amp_fx.autocast("cpu", bf16, policy=WIDE):
            first = x @ x
            with amp_fx.autocast("cpu", bf16, policy=LOW):
                second = (x @ x, x.sin())
                with amp_fx.autocast("cpu", bf16, policy="torch"):
                    third = (x @ x, x.sin())
            return first, *second, *third, x.sin(), x * first

    whole = torch.compile(program, backend="amp_fx", options={"compiler": "eager"}, fullgraph=True)
    found = whole(x)
    assert [y.dtype for y in found] == [f32, bf16, bf16, bf16, f32, f32, f32]
    low = x.bfloat16()
    expected = (x @ x, low @ low, low.sin(), low @ low, x.sin(), x.sin(), x * (x @ x))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@OTHER_BACKEND
def test_graphs_of_other_backends_follow_native_autocast(x: torch.Tensor) -> None:
    call = torch.compile(lambda x: x @ x, backend="aot_eager")
    with amp_fx.autocast("cpu", bf16, policy=WIDE):
        found = call(x)
    with torch.autocast("cpu", bf16):
        assert torch.equal(found, x @ x)
        assert found.dtype == bf16


def test_unflatten_breaks_no_graph_in_a_region_with_a_policy(x: torch.Tensor) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with amp_fx.autocast("cpu", bf16, policy=WIDE):
            y: Any = x @ x
            result: torch.Tensor = y.unflatten(-1, (2, -1))
        return result

    expected = (x @ x).unflatten(-1, (2, -1))  # type: ignore[no-untyped-call]
    whole = torch.compile(program, backend="amp_fx", options={"compiler": "eager"}, fullgraph=True)
    torch.testing.assert_close(whole(x), expected, rtol=0, atol=0)
