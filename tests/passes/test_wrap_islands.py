"""wrap_islands: what cannot be rewritten runs under native autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.backend.pipeline import default_passes, run_passes
from amp_fx.passes.wrap_islands import WrapIslands
from tests.programs import assert_same_bits, matrices, run_program, site

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.policies.policy import Policy
    from tests.programs import Captured, Program

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"  # Dynamo instantiates Functions
)


class ThreeTimes(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (w,) = ctx.saved_tensors
        return 3 * (grad.float() @ w.t()), None


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = ThreeTimes.apply(x, w)  # type: ignore[no-untyped-call]
    return result @ x


def vmapped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.func.vmap(lambda row: row @ w)(x)
    return result @ x


def two_in_a_row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    first: torch.Tensor = torch.func.vmap(lambda row: row @ w)(x)
    second: torch.Tensor = torch.func.vmap(lambda row: row @ x)(w)
    return first + second


PROGRAMS = {"function": function, "vmap": vmapped, "two": two_in_a_row}


def rewrite(captured: Captured, policy: Policy, **where: Any) -> dict[str, int]:
    """Runs the whole pipeline, of which this pass is the last; checks the graph."""
    passes = default_passes(policy, site(**where), restores_outputs=False)
    return dict(run_passes(captured.gm, passes, check=True)[-1].counts)


def test_golden(capture: Callable[..., Captured], rng: torch.Generator, policy: Policy) -> None:
    captured = capture(vmapped, *matrices(rng))
    assert rewrite(captured, policy) == {"islands": 1}
    lines = captured.text().splitlines()
    names = [line.split(" = ")[0].split(":")[0] for line in lines[1:-1]]
    inside = names[names.index("enter_autocast") + 1 : names.index("exit_autocast")]
    assert inside == [
        "vmap_increment_nesting",
        "add_batch_dim",
        "matmul",
        "remove_batch_dim",
        "vmap_decrement_nesting",
    ]
    assert "enter_autocast = _enter_autocast('cpu', torch.bfloat16, True, True)" in lines
    assert "exit_autocast = _exit_autocast(enter_autocast)" in lines
    assert "matmul_1: bf16 = aten.matmul.default(remove_batch_dim, x_bf16)" in lines


def test_markers_carry_the_settings_of_the_region(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(function, *matrices(rng))
    rewrite(captured, policy, dtype=torch.float16, cache_enabled=False)
    assert captured.node("enter_autocast").args == ("cpu", torch.float16, True, False)


def test_graph_without_islands_is_not_modified(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(lambda x, w: x @ w, *matrices(rng))
    assert rewrite(captured, policy) == {}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_islands_where_nothing_autocasts_are_untouched(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy, program: Program
) -> None:
    captured = capture(program, *matrices(rng))
    before = captured.text()
    assert rewrite(captured, policy, enabled=False) == {}
    assert captured.text() == before


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_second_run_changes_nothing(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy, program: Program
) -> None:
    captured = capture(program, *matrices(rng))
    assert rewrite(captured, policy)
    before = captured.text()
    assert not WrapIslands().call(captured.gm).modified
    assert captured.text() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_numbers(
    capture: Callable[..., Captured],
    rng: torch.Generator,
    policy: Policy,
    program: Program,
    dtype: torch.dtype,
) -> None:
    args = matrices(rng)
    captured = capture(program, *args)
    rewrite(captured, policy, dtype=dtype)
    assert_same_bits(run_program(captured, args), run_program(program, args, dtype))
