"""mark_regions: the region of every node, and the opaque nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad

from amp_fx.graphs.opaque import TRANSFORM
from amp_fx.passes.mark_regions import MarkRegions
from tests.programs import capture_program, matrices, node_names, run_settling, site

if TYPE_CHECKING:
    from tests.programs import Captured


def nested(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    with torch.autocast("cpu", torch.float16):
        y = y @ v
        with torch.autocast("cpu", enabled=False):
            y = y.float() @ w
        y = y @ y
    return y.float() @ w


def dtypes_by_node(captured: Captured) -> dict[str, torch.dtype | None]:
    """For each call, the dtype that the CPU autocasts to there; None if it does not."""
    found: dict[str, torch.dtype | None] = {}
    for node, name in node_names(captured.gm.graph).items():
        if node.op in ("call_function", "call_method"):
            state = node.meta["site"].state
            found[name] = state.low_dtype("cpu") if "cpu" in state.enabled else None
    return found


def test_golden(rng: torch.Generator) -> None:
    captured = capture_program(nested, *matrices(rng, 3))
    assert run_settling(captured.gm, [MarkRegions(site())]) == {"regions": 2}
    assert captured.text().splitlines()[1:] == [
        "matmul: f32 = matmul(x, w)",
        "matmul_1: f16 = matmul(matmul, v)",
        "float: f32 = .float(matmul_1)",
        "matmul_2: f32 = matmul(float, w)",
        "matmul_3: f16 = matmul(matmul_2, matmul_2)",
        "float_1: f32 = .float(matmul_3)",
        "matmul_4: f32 = matmul(float_1, w)",
        "return (matmul_4,)",
    ]
    assert dtypes_by_node(captured) == {
        "matmul": torch.bfloat16,
        "matmul_1": torch.float16,
        "float": None,
        "matmul_2": None,
        "matmul_3": torch.float16,
        "float_1": torch.bfloat16,
        "matmul_4": torch.bfloat16,
    }


def test_cache_setting_ends_with_its_region(rng: torch.Generator) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", cache_enabled=False):
            y = x @ x
        return y.float() @ x

    captured = capture_program(program, *matrices(rng, 3)[:1])
    MarkRegions(site()).call(captured.gm)
    settings = [captured.node(name).meta["site"].state for name in ("matmul", "matmul_1")]
    assert [state.cache_enabled for state in settings] == [False, True]


def test_grad_mode_is_followed_and_its_switches_stay(rng: torch.Generator) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x @ x
        return y @ x

    captured = capture_program(program, *matrices(rng, 3)[:1])
    before = captured.text()
    MarkRegions(site()).call(captured.gm)
    modes = [captured.node(name).meta["site"].is_grad_enabled for name in ("matmul", "matmul_1")]
    assert modes == [False, True]
    assert captured.text() == before


def test_nodes_between_functorch_levels_are_opaque_together(rng: torch.Generator) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.func.vmap(lambda row: row @ w)(x)
        return y @ w

    captured = capture_program(program, *matrices(rng, 3)[:2])
    MarkRegions(site()).call(captured.gm)
    reasons = {
        name: node.meta.get("opaque")
        for node, name in node_names(captured.gm.graph).items()
        if "matmul" in name or "nesting" in name
    }
    assert reasons == {
        "vmap_increment_nesting": TRANSFORM,
        "matmul": TRANSFORM,
        "vmap_decrement_nesting": TRANSFORM,
        "matmul_1": None,
    }


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # since torch 2.15
def test_nodes_of_a_forward_ad_level_are_opaque_together(rng: torch.Generator) -> None:
    def program(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, t) @ w  # type: ignore[no-untyped-call]
            tangent: torch.Tensor = forward_ad.unpack_dual(dual).tangent  # type: ignore[no-untyped-call]
        return tangent @ w

    captured = capture_program(program, *matrices(rng, 3))
    MarkRegions(site()).call(captured.gm)
    names = node_names(captured.gm.graph).items()
    reasons = [node.meta.get("opaque") for node, name in names if "matmul" in name]
    assert reasons == [TRANSFORM, None]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_higher_order_ops_are_opaque(rng: torch.Generator) -> None:
    captured = capture_program(squared, *matrices(rng, 3)[:1])
    MarkRegions(site()).call(captured.gm)
    assert captured.node("autograd_function_apply").meta["opaque"] == "higher-order op"


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = 2 * x * grad
        return result


def squared(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Squared.apply(x)  # type: ignore[no-untyped-call]
    return result
