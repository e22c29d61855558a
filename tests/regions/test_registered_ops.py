"""registered_ops: ops of a library's own, in eager and in compiled code."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import amp_fx
from amp_fx import CastPolicy, Policy
from amp_fx.errors import PolicyError
from amp_fx.regions import registered_ops
from tests.programs import compiled, decisions_of

if TYPE_CHECKING:
    from collections.abc import Iterator

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
_library = torch.library.Library("amp_fx_test", "DEF")  # type: ignore[no-untyped-call]


def define(name: str) -> torch._ops.OpOverload:
    """Returns an op that adds the third of its arguments to the product of the other two."""
    qualified = f"amp_fx_test::{name}"

    def kernel(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x * y + bias

    op = torch.library.custom_op(qualified, kernel, mutates_args=())
    op.register_fake(lambda x, y, bias: x * y + bias)
    op.register_autograd(lambda _, grad: (grad, grad, grad))
    overload: torch._ops.OpOverload = getattr(torch.ops.amp_fx_test, name).default
    return overload


lowered, promoted, mixed, listed, composed = map(
    define, ("lowered", "promoted", "mixed", "listed", "composed")
)
amp_fx.register_op("amp_fx_test::lowered", "lower_precision_fp", args={"bias": "fp32"})
amp_fx.register_op("amp_fx_test::promoted", CastPolicy.PROMOTE)


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(4, generator=rng)


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    registered_ops._reported.clear()
    with caplog.at_level(logging.WARNING, "amp_fx"):
        yield caplog


def test_policy_and_arguments_hold_everywhere(x: torch.Tensor) -> None:
    def program(x: torch.Tensor) -> Any:
        return lowered(x, x, x)

    low = x.bfloat16()
    expected = low * low + x
    assert expected.dtype == f32
    with torch.autocast("cpu"):
        torch.testing.assert_close(program(x), expected, rtol=0, atol=0)
    for policy in (Policy.default(), amp_fx.preset("ipex")):
        torch._dynamo.reset()
        actual = compiled(program, policy=policy, output_dtype="autocast")(x)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch._dynamo.reset()
    [decided] = decisions_of(program, x, policy=Policy.default())
    assert decided.origin == "register_op"


def test_a_policy_says_otherwise(x: torch.Tensor) -> None:
    policy = Policy.default().with_ops({"amp_fx_test::promoted": "lower_precision_fp"})
    with torch.autocast("cpu"):
        assert promoted(x, x.bfloat16(), x).dtype == f32
    call = compiled(lambda x: promoted(x, x, x), policy=policy, output_dtype="autocast")
    assert call(x).dtype == bf16
    assert promoted(x, x.bfloat16(), x).dtype == f32, "outside of any region nothing is cast"


def test_mixed_dtypes_are_reported_once_with_the_line_to_paste(
    x: torch.Tensor, reports: pytest.LogCaptureFixture
) -> None:
    def program(x: torch.Tensor) -> Any:
        low = x[None] @ x[:, None]
        return mixed(low, x, x) + mixed(low, low, x)

    compiled(program)(x)
    [record] = reports.records
    assert "amp_fx_test::mixed receives bfloat16 and float32" in record.getMessage()
    assert 'amp_fx.register_op("amp_fx_test::mixed", "fp32")' in record.getMessage()


def test_nothing_is_reported_of_ops_that_are_listed_or_get_one_dtype(
    x: torch.Tensor, reports: pytest.LogCaptureFixture
) -> None:
    policy = Policy.default().with_ops({"amp_fx_test::listed": "keep"})

    def program(x: torch.Tensor) -> Any:
        low = x[None] @ x[:, None]
        return listed(low, x, x) + composed(x, x, x) + promoted(low, x, x)

    compiled(program, policy=policy)(x)
    assert not reports.records


def test_an_ops_own_autocast_kernel_is_honoured(x: torch.Tensor) -> None:
    own = define("own_kernel")
    torch.library.register_autocast("amp_fx_test::own_kernel", "cpu", f16)

    def program(x: torch.Tensor) -> Any:
        return own(x, x, x)

    assert compiled(program, output_dtype="autocast")(x).dtype == f16
    torch._dynamo.reset()
    policy = Policy.default().with_ops({"amp_fx_test::own_kernel": "fp32"})
    assert compiled(program, policy=policy, output_dtype="autocast")(x.half()).dtype == f32


def test_a_triton_op_is_an_op_like_any_other(x: torch.Tensor) -> None:
    """Registers a Triton op without a Triton kernel, which would need a GPU."""

    @torch.library.triton_op("amp_fx_test::in_triton", mutates_args=())
    def in_triton(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    amp_fx.register_op("amp_fx_test::in_triton", "lower_precision_fp")
    call = compiled(in_triton, output_dtype="autocast")
    torch.testing.assert_close(call(x), x.bfloat16() * 2, rtol=0, atol=0)
    with torch.autocast("cpu"):
        assert in_triton(x).dtype == bf16


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("amp_fx_test::lowerd", "fp32"), "no op 'amp_fx_test::lowerd'; similar names: .*lowered"),
        (("amp_fx_test::lowered", "fp31"), "did you mean 'fp32'"),
        (("amp_fx_test::lowered", "fp32"), "registered as lower_precision_fp"),
        (("amp_fx_test::mixed", "fp32", {"z": "keep"}), "one of its tensor arguments x, y, bias"),
        (("amp_fx_test::mixed", "fp32_set_opt_dtype"), "cannot be fp32_set_opt_dtype"),
        (("aten::relu", "fp32"), "is an op of PyTorch, which cannot be registered"),
    ],
)
def test_mistakes_are_told(args: tuple[str, str], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        amp_fx.register_op(*args)


def test_registering_again_alike_is_no_mistake() -> None:
    amp_fx.register_op("amp_fx_test::promoted", "promote")


def test_a_banned_op_says_so(x: torch.Tensor) -> None:
    policy = Policy.default().with_ops({"amp_fx_test::composed": "banned"})
    with pytest.raises(BackendCompilerFailed, match="composed is banned by the policy"):
        compiled(lambda x: composed(x, x, x), policy=policy)(x)


@pytest.mark.falls_back
@pytest.mark.parametrize("call", ["eager", "eager with a policy", "compiled"])
def test_registering_after_a_failed_run_takes_effect(
    x: torch.Tensor, reports: pytest.LogCaptureFixture, call: str
) -> None:
    """Registers an op after it rejected mixed dtypes, as the message suggests."""
    name = f"amp_fx_test::picky_{call.replace(' ', '_')}"

    @torch.library.custom_op(name, mutates_args=())
    def picky(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.dtype == b.dtype, "a mixture"
        return a + b

    picky.register_fake(lambda a, b: torch.empty_like(a + b))

    def program(x: torch.Tensor) -> Any:
        return picky(x[None] @ x[:, None], x[:1, None])

    policy = Policy.default().with_modules({"*": "fp32"}) if "policy" in call else None
    run = compiled(program, output_dtype="autocast") if call == "compiled" else program
    region = torch.autocast("cpu")  # outside of regions, the inputs are cast back
    if policy is not None:
        Policy.default().resolver.decide((torch.ops.aten.mm.default, (x, x), {}), "cpu", ())
    with region, pytest.raises(AssertionError, match="a mixture"):
        run(x)
    assert call != "compiled" or any(name in r.getMessage() for r in reports.records)
    amp_fx.register_op(name, "fp32")
    with region:
        assert run(x).dtype == f32


def test_registering_an_op_that_was_reported_takes_effect_in_compiled_code(
    x: torch.Tensor, reports: pytest.LogCaptureFixture
) -> None:
    late = define("late")
    call = compiled(lambda x: late(x[None] @ x[:, None], x, x), output_dtype="autocast")
    assert call(x).dtype == f32
    assert len(reports.records) == 1
    amp_fx.register_op("amp_fx_test::late", "lower_precision_fp")
    assert call(x).dtype == bf16
