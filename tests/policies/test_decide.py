"""treatment: what keep, same_as_input and single arguments do to a call; the lean preset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import CastPolicy, Policy, preset
from tests.programs import assert_same_bits, compiled, decisions_of, run_program

if TYPE_CHECKING:
    from collections.abc import Callable

bf16, f32 = torch.bfloat16, torch.float32
aten = torch.ops.aten
DEFAULT = Policy.default()

# Normalizations and softmax, as CUDA's table has them, on tensors of any device.
NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten::layer_norm": lambda x: nn.functional.layer_norm(x, (8,)),
    "aten::group_norm": lambda x: nn.functional.group_norm(x, 2),
    "aten::rms_norm": lambda x: nn.functional.rms_norm(x, (8,)),
    "aten::softmax.int": lambda x: x.softmax(-1),
}


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 8, generator=rng).requires_grad_()


def region(policy: Policy) -> Any:
    return amp_fx.autocast("cpu", policy=policy)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("compiler", [None, "eager", "aot_eager"])
def test_same_as_input_computes_in_float32(op: str, compiler: str | None, x: torch.Tensor) -> None:
    """Against the same by hand; eager, and compiled; gradients included."""
    policy = DEFAULT.with_ops({op: "same_as_input"})

    def program(x: torch.Tensor) -> torch.Tensor:
        return NORMS[op](x.bfloat16()) * 3

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        return NORMS[op](x.bfloat16().float()).bfloat16() * 3

    def in_region(x: torch.Tensor) -> torch.Tensor:
        with region(policy):
            return program(x)

    call = in_region
    if compiler is not None:
        call = compiled(program, policy=policy, compiler=compiler, output_dtype="autocast")
    assert_same_bits(run_program(call, [x]), run_program(by_hand, [x]))


@pytest.mark.parametrize("dtype", [f32, torch.float64])
def test_same_as_input_leaves_wide_inputs(dtype: torch.dtype, x: torch.Tensor) -> None:
    policy = DEFAULT.with_ops({"softmax": "same_as_input"})
    with region(policy):
        assert x.to(dtype).softmax(-1).dtype == dtype
        assert x.bfloat16().softmax(-1, dtype=f32).dtype == f32


def test_the_first_input_gives_the_dtype(x: torch.Tensor) -> None:
    policy = DEFAULT.with_ops({"layer_norm": "same_as_input"})
    weight = torch.ones(8, dtype=bf16)
    with region(policy):
        assert nn.functional.layer_norm(x, (8,), weight).dtype == f32
        assert nn.functional.layer_norm(x.bfloat16(), (8,), weight.float()).dtype == bf16


def test_kept_ops_are_not_looked_into(x: torch.Tensor) -> None:
    """``einsum`` has no policy on the CPU, the products that it makes have one."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,kj->ik", x, x)

    assert [d.op for d in decisions_of(program, x, policy=DEFAULT)] == ["aten::bmm"]
    policy = DEFAULT.with_ops({"einsum": "keep"})
    torch._dynamo.reset()
    [decided] = decisions_of(program, x, policy=policy)
    assert (decided.op, decided.policy) == ("aten::einsum", "keep")
    assert compiled(program, policy=policy, output_dtype="autocast")(x).dtype == f32
    with region(policy):
        assert program(x).dtype == f32


# The lean preset.


def test_lean_changes_nothing_but_norms_and_softmax() -> None:
    lean = preset("lean")
    assert lean.tables["cpu"] == DEFAULT.tables["cpu"]
    for device in ("cuda", "xpu", "mps"):
        ours, theirs = lean.tables[device], DEFAULT.tables[device]
        assert set(ours) == set(theirs)
        changed = {op for op in ours if ours[op] is not theirs[op]}
        assert changed == {op for op in changed if ours[op] is CastPolicy.SAME_AS_INPUT}
        assert {"aten::layer_norm", "aten::softmax.int"} <= changed
        assert all("norm" in op or "softmax" in op for op in changed)
        assert "aten::log_softmax.int" not in changed
