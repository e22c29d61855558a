"""treatment: what keep, same_as_input and single arguments do to a call; the lean preset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("policy", ["same_as_input", "lower_precision_io"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_norms_compute_in_float32_of_a_low_input(
    compiler: str, policy: str, op: str, x: torch.Tensor
) -> None:
    """Compares results and gradients with a computation by hand."""
    is_low = policy == "same_as_input"  # the other one casts the input itself

    def program(x: torch.Tensor) -> torch.Tensor:
        return NORMS[op](x.bfloat16() if is_low else x) * 3

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        return NORMS[op](x.bfloat16().float()).bfloat16() * 3

    call = called(program, DEFAULT.with_ops({op: policy}), compiler)
    assert_same_bits(run_program(call, [x]), run_program(by_hand, [x]))


@pytest.mark.parametrize("dtype", [f32, torch.float64])
def test_same_as_input_leaves_wide_inputs(dtype: torch.dtype, x: torch.Tensor) -> None:
    policy = DEFAULT.with_ops({"softmax": "same_as_input"})
    x = x.detach()
    assert called(lambda x: x.softmax(-1), policy)(x.to(dtype)).dtype == dtype
    explicit = called(lambda x: x.softmax(-1, dtype=f32), policy)
    assert explicit(x.bfloat16()).dtype == f32


def test_the_first_input_gives_the_dtype(x: torch.Tensor) -> None:
    policy = DEFAULT.with_ops({"layer_norm": "same_as_input"})
    weight = torch.ones(8, dtype=bf16)
    norm = called(lambda x, w: nn.functional.layer_norm(x, (8,), w), policy)
    x = x.detach()
    assert norm(x, weight).dtype == f32
    assert norm(x.bfloat16(), weight.float()).dtype == bf16


def test_kept_ops_are_not_looked_into(x: torch.Tensor) -> None:
    """``einsum`` has no policy on the CPU, the products that it makes have one."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,kj->ik", x, x)

    assert [d.op for d in decisions_of(program, x, policy=DEFAULT)] == ["aten::bmm"]
    policy = DEFAULT.with_ops({"einsum": "keep"})
    torch._dynamo.reset()
    [decided] = decisions_of(program, x, policy=policy)
    assert (decided.op, decided.policy) == ("aten::einsum", "keep")
    assert called(program, policy)(x).dtype == f32


def called(
    program: Callable[..., torch.Tensor], policy: Policy, compiler: str = "eager"
) -> Callable[..., torch.Tensor]:
    """Returns a program compiled under a policy, whose outputs keep their dtypes."""
    return compiled(program, policy=policy, compiler=compiler, output_dtype="autocast")


def test_weights_of_a_norm_are_not_rounded(rng: torch.Generator) -> None:
    x = torch.randn(4, 8, generator=rng)
    weight = torch.randn(8, generator=rng)
    policy = DEFAULT.with_ops({"layer_norm": "lower_precision_io"})
    norm = called(lambda x, w: nn.functional.layer_norm(x, (8,), w), policy)
    low = x.bfloat16().float()
    assert torch.equal(norm(x, weight), nn.functional.layer_norm(low, (8,), weight).bfloat16())
    rounded = nn.functional.layer_norm(low, (8,), weight.bfloat16().float()).bfloat16()
    assert not torch.equal(norm(x, weight), rounded)


ADDED: dict[str, tuple[Any, Any, torch.dtype]] = {
    "a stream and a low branch": (torch.randn(2, 4), torch.randn(2, 4).bfloat16(), bf16),
    "a low branch and a stream": (torch.randn(2, 4).bfloat16(), torch.randn(2, 4), bf16),
    "both low": (torch.randn(2, 4).bfloat16(), torch.randn(2, 4).bfloat16(), bf16),
    "both float32": (torch.randn(2, 4), torch.randn(2, 4), f32),
    "a bias": (torch.randn(2, 4).bfloat16(), torch.randn(4), f32),
    "a mask for all": (torch.randn(2, 4, 4).bfloat16(), torch.randn(1, 4, 4), f32),
    "vectors, such as losses": (torch.randn(4).bfloat16(), torch.randn(4), f32),
    "a number": (torch.randn(2, 4), 1.0, f32),
    "a number and a low one": (torch.randn(2, 4).bfloat16(), 1.0, bf16),
    "float64": (torch.randn(2, 4).double(), torch.randn(2, 4).bfloat16(), torch.float64),
    "the other low dtype": (torch.randn(2, 4), torch.randn(2, 4).half(), f32),
    "integers": (torch.randn(2, 4).bfloat16(), torch.ones(2, 4, dtype=torch.long), bf16),
}


@pytest.mark.parametrize("name", ADDED)
def test_demote_lowers_sums_of_a_stream_and_a_low_branch(name: str) -> None:
    left, right, dtype = ADDED[name]
    policy = DEFAULT.with_ops({"add.Tensor": "demote"})
    call = called(lambda x, y: x + y, policy)
    expected = left + right
    if dtype is bf16:
        expected = left.bfloat16() + (right.bfloat16() if torch.is_tensor(right) else right)
    actual = call(left, right)
    assert actual.dtype is dtype
    assert torch.equal(actual, expected)


# The lean preset.


def test_lean_changes_norms_softmax_and_sums() -> None:
    lean = preset("lean")
    for device in ("cpu", "cuda", "xpu", "mps"):
        ours, theirs = lean.tables[device], DEFAULT.tables[device]
        assert set(ours) - set(theirs) == {"aten::add.Tensor"}
        changed = {op for op in ours if ours[op] is not theirs.get(op)} - {"aten::add.Tensor"}
        assert all("norm" in op or "softmax" in op for op in changed)
        if device == "cpu":
            assert not changed
            continue
        assert ours["aten::layer_norm"] is CastPolicy.LOWER_PRECISION_IO
        assert ours["aten::softmax.int"] is CastPolicy.SAME_AS_INPUT
        assert "aten::log_softmax.int" not in changed
