"""Measuring what autocast does to an op, with and without a device."""

from __future__ import annotations

import pytest
import torch

from amp_fx.errors import PolicyError
from amp_fx.regions.drift import MEASURED, measure
from amp_fx.tables.cast_policy import CastPolicy


@pytest.mark.parametrize(
    ("op", "device_type", "policy"),
    [
        ("aten::linear", "cpu", CastPolicy.LOWER_PRECISION_FP),
        ("aten::einsum", "cuda", CastPolicy.LOWER_PRECISION_FP),
        ("aten::mse_loss", "cpu", CastPolicy.FP32),
        ("aten::layer_norm", "cuda", CastPolicy.FP32),
        ("aten::softmax.int", "mps", CastPolicy.FP32),
        ("aten::softmax.int", "cuda", CastPolicy.FP32_SET_OPT_DTYPE),
        ("aten::norm.Scalar", "cuda", CastPolicy.FP32_APPEND_DTYPE),
        ("aten::norm.ScalarOpt_dim", "xpu", CastPolicy.FP32_APPEND_DTYPE),
        ("aten::cat", "cpu", CastPolicy.PROMOTE),
        ("aten::index_put", "cuda", CastPolicy.PROMOTE),
        ("aten::binary_cross_entropy", "cuda", CastPolicy.BANNED),
        ("aten::binary_cross_entropy", "cpu", CastPolicy.FP32),
        ("aten::layer_norm", "cpu", None),
        ("aten::softmax.int", "cpu", None),
        ("aten::cat", "cuda", None),
        ("aten::add.Tensor", "cuda", None),
        ("aten::mm.out", "cuda", None),
    ],
)
def test_known_ops(op: str, device_type: str, policy: CastPolicy | None) -> None:
    assert measure(op, device_type) is policy


def test_agrees_with_the_dtypes_that_eager_autocast_computes_in() -> None:
    x = torch.ones(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(x, x).dtype is torch.bfloat16
        assert torch.prod(x.bfloat16()).dtype is torch.float32
        assert torch.softmax(x.bfloat16(), -1).dtype is torch.bfloat16
    assert measure("aten::mm", "cpu") is CastPolicy.LOWER_PRECISION_FP
    assert measure("aten::prod", "cpu") is CastPolicy.FP32
    assert measure("aten::softmax.int", "cpu") is None


@pytest.mark.parametrize("device_type", MEASURED)
def test_leaves_the_op_and_the_autocast_state_as_they_were(device_type: str) -> None:
    was = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_dtype(device_type, torch.float16)
    try:
        measure("aten::mm", device_type)
        assert torch.get_autocast_dtype(device_type) is torch.float16
        assert torch.is_autocast_enabled(device_type) is was[0]
    finally:
        torch.set_autocast_dtype(device_type, was[1])
    x = torch.eye(2, requires_grad=True)
    [grad] = torch.autograd.grad(torch.mm(x, x).sum(), x)
    assert torch.equal(grad, torch.full((2, 2), 2.0))


def test_a_kernel_unlike_every_policy_is_said_to_be_one() -> None:
    with torch.library._scoped_library("amp_fx_test_measure", "DEF") as library:
        library.define("f(Tensor x) -> Tensor")
        off = torch._C._ExcludeDispatchKeyGuard

        def always_half(x: torch.Tensor) -> torch.Tensor:
            with off(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
                result: torch.Tensor = torch.ops.amp_fx_test_measure.f(x.half())
            return result

        library.impl("f", always_half, "AutocastCPU")
        with pytest.raises(PolicyError, match="treats amp_fx_test_measure::f on cpu as no cast"):
            measure("amp_fx_test_measure::f", "cpu")
        assert measure("amp_fx_test_measure::f", "cuda") is None


@pytest.mark.parametrize(
    ("op", "device_type", "message"),
    [
        ("aten::mm", "maia", "cannot be measured on 'maia', only on cpu, cuda, xpu, mps"),
        ("aten::no_such_op", "cpu", "has no op 'aten::no_such_op'"),
        ("aten::softmax.no_such_overload", "cpu", "has no op"),
        ("aten::fft_fftfreq", "cpu", "takes no tensor"),
    ],
)
def test_what_cannot_be_measured(op: str, device_type: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        measure(op, device_type)
