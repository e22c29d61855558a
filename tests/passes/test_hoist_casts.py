"""hoist_casts: casts of weights leave the bodies of checkpoints and branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from amp_fx.passes.hoist_casts import HoistCasts
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.mark_regions import MarkRegions
from tests.programs import (
    POLICY,
    assert_same_bits,
    capture_program,
    compiled,
    graph_text,
    matrices,
    run_program,
    run_settling,
    site,
)

if TYPE_CHECKING:
    from collections import Counter

    from tests.programs import Captured, Program


def hoist(captured: Captured, *weights: str) -> Counter[str]:
    """Runs the pass after those that it needs; checks the graph."""
    passes = (MarkRegions(site()), InsertCasts(POLICY), HoistCasts(weights))
    return run_settling(captured.gm, passes)


def body_text(captured: Captured) -> list[str]:
    [body] = [m for m in captured.gm.children() if isinstance(m, fx.GraphModule)]
    return graph_text(body).splitlines()


def in_checkpoint(function: Program) -> Program:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        return checkpoint(function, x, w, use_reentrant=False)

    return program


products = in_checkpoint(lambda x, w: (x * x) @ w @ w)


def test_golden(rng: torch.Generator) -> None:
    args = matrices(rng)
    captured = capture_program(products, *args)
    assert hoist(captured) == {"casts_hoisted": 2}
    assert "w_bf16: bf16 = aten._to_copy.default(w, dtype=torch.bfloat16)" in captured.text()
    assert body_text(captured) == [
        "graph(x: f32, w: f32, w__bfloat16: bf16)",
        "mul: f32 = mul(x, x)",
        "mul_bf16: bf16 = aten._to_copy.default(mul, dtype=torch.bfloat16)",
        "matmul: bf16 = aten.matmul.default(mul_bf16, w__bfloat16)",
        "matmul_1: bf16 = aten.matmul.default(matmul, w__bfloat16)",
        "return (matmul_1,)",
    ]

    def run(*leaves: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = captured.gm(*(leaves[i] for i in captured.order))[0]
        return result

    assert_same_bits(run_program(run, args), run_program(products, args, torch.bfloat16))


def test_frozen_weights_are_hoisted_if_they_are_to_be_kept(rng: torch.Generator) -> None:
    args = [matrices(rng)[0], matrices(rng, is_frozen=True)[1]]
    captured = capture_program(products, *args)
    assert hoist(captured, captured.node("w").name) == {"casts_hoisted": 2}
    assert not hoist(capture_program(products, *args))


def written(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.no_grad():
        w.mul_(2)
    return products(x, w)


UNTOUCHED: dict[str, Program] = {
    "activation": in_checkpoint(lambda x, w: (x * w) @ (x * w)),
    "view": in_checkpoint(lambda x, w: (x * w) @ w.t()),
    "weight that is written": written,
    "no body": lambda x, w: x @ w,
}


@pytest.mark.parametrize("program", UNTOUCHED.values(), ids=UNTOUCHED)
def test_non_matches_are_untouched(rng: torch.Generator, program: Program) -> None:
    captured = capture_program(program, *matrices(rng))
    assert not hoist(captured)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_reentrant_checkpoint_shares_no_cast_with_its_surroundings(compiler: str) -> None:
    """Recomputes with a separate autocast cache, within which casts are shared."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(16, 16), torch.randn(8, 16)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        y = y * torch.nn.functional.cosine_similarity(y, x, dim=-1)[:, None]
        result: torch.Tensor = checkpoint(lambda t: model(model(t)), y, use_reentrant=True)
        return result

    def grads(call: Any) -> list[torch.Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.float16):
            result = call(leaf)
        result.float().sum().backward()  # a reentrant checkpoint refuses autograd.grad
        found = [leaf.grad, model.weight.grad, model.bias.grad]
        return [result.detach(), *(g.clone() for g in found if g is not None)]

    expected = grads(program)
    assert len(expected) == 4
    torch.testing.assert_close(
        grads(compiled(program, compiler=compiler)), expected, rtol=0, atol=0
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, of Dynamo in eager cond
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_branches_share_no_casts(compiler: str, rng: torch.Generator) -> None:
    """``cond`` traces its own backward: gradients of each use of a weight add up in float32."""

    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = x @ w
        return torch.cond(y.sum() > -1e9, lambda y: (y @ w).relu() @ w, lambda y: y @ w, (y,))

    args = [torch.randn(16, 16, generator=rng).requires_grad_() for _ in range(2)]
    expected = run_program(program, args, torch.bfloat16)
    found = run_program(compiled(program, compiler=compiler), args, torch.bfloat16)
    assert_same_bits(found, expected)
