"""wrap_opaque_nodes: what cannot be rewritten runs under native autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.backend.pipeline import captured_passes
from tests.programs import POLICY, capture_program, matrices, run_settling, site

if TYPE_CHECKING:
    from collections import Counter

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


def rewrite(captured: Captured, **where: Any) -> Counter[str]:
    """Runs the whole pipeline, of which this pass is the last; checks the graph."""
    passes = captured_passes(POLICY, site(**where), restores_outputs=False)
    return run_settling(captured.gm, passes)


def test_golden(rng: torch.Generator) -> None:
    captured = capture_program(vmapped, *matrices(rng))
    assert rewrite(captured) == {"opaque_nodes": 1}
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


def test_markers_carry_the_settings_of_the_region(rng: torch.Generator) -> None:
    captured = capture_program(function, *matrices(rng))
    rewrite(captured, dtype=torch.float16, cache_enabled=False)
    assert captured.node("enter_autocast").args == ("cpu", torch.float16, True, False)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_opaque_nodes_where_nothing_autocasts_are_untouched(
    rng: torch.Generator, program: Program
) -> None:
    captured = capture_program(program, *matrices(rng))
    before = captured.text()
    assert rewrite(captured, enabled=False) == {}
    assert captured.text() == before
