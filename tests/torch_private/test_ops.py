"""torch_private.ops and kernels: what is relied on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx.torch_private import kernels, ops
from amp_fx.torch_private.recurrent import lstm

aten = torch.ops.aten


def test_ops_of_torch_are_of_these_classes() -> None:
    assert isinstance(aten.mm.default, ops.OpOverload)
    assert isinstance(aten.mm, ops.OpOverloadPacket)
    assert isinstance(torch.ops.higher_order.cond, ops.HigherOrderOperator)


def test_a_custom_op_knows_its_qualified_name() -> None:
    op = torch.library.custom_op(
        "amp_fx_test::named", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert isinstance(op, ops.CustomOpDef)
    assert op._qualname == "amp_fx_test::named"


def test_all_op_names_has_overloads() -> None:
    assert {"aten::add.Tensor", "aten::mm"} <= set(ops.all_op_names())


def test_schema_of_knows_what_is_written() -> None:
    assert not ops.schema_of("aten::add", "Tensor").is_mutable
    assert ops.schema_of("aten::add_", "Tensor").is_mutable
    with pytest.raises(RuntimeError):
        ops.schema_of("aten::there_is_none", "")


def test_kernels_are_found_by_key() -> None:
    assert ops.has_kernels("aten::mm")
    assert not ops.has_kernels("aten::there_is_none")
    assert ops.has_kernel_for("aten::mm", "CPU")
    assert not ops.has_kernel_for("aten::mm", "CompositeImplicitAutograd")
    assert ops.has_kernel_for("aten::matmul", "CompositeImplicitAutograd")
    assert {"aten::mm", "aten::matmul"} <= {*ops.ops_with_kernel_for("AutocastCPU")}


def test_autocast_keys_have_a_fallback_and_come_first() -> None:
    autocast_cpu = ops.DispatchKey.AutocastCPU
    assert ops.has_backend_fallback(autocast_cpu)
    after = ops.keyset_full_after(autocast_cpu)
    assert after.has(ops.DispatchKey.CPU)
    assert not after.has(autocast_cpu)


def test_an_excluded_key_is_not_dispatched_to() -> None:
    x = torch.ones(2, 2)
    key = ops.DispatchKeySet(ops.DispatchKey.AutocastCPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with ops.ExcludeDispatchKeyGuard(key):
            assert (x @ x).dtype == torch.float32


def test_random_ops_and_effects_are_impure() -> None:
    assert not ops.is_impure(aten.mm.default)
    assert ops.is_impure(aten.bernoulli.default)


def test_scaled_mm_multiplies_the_scales() -> None:
    a = torch.eye(16).to(torch.float8_e4m3fn)
    b = torch.full((16, 16), 2.0).to(torch.float8_e4m3fn)
    two = torch.tensor(2.0)
    out = kernels.scaled_mm(a, b.t(), scale_a=two, scale_b=two, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert (out == 8).all()


def test_masked_softmax() -> None:
    """1 masks keys of each batch element, 0 is the same for all; True is masked."""
    scores, keys = torch.randn(2, 3, 4, 4), torch.arange(4) > 1
    each = kernels.masked_softmax(scores, keys.expand(2, 4), 3, 1)
    same = kernels.masked_softmax(scores, keys.expand(4, 4), 3, 0)
    expected = scores.masked_fill(keys, -torch.inf).softmax(3)
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(same, expected)


def test_foreach_kernels() -> None:
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    kernels.foreach_mul_(tensors, torch.tensor(2.0))
    assert [t.tolist() for t in tensors] == [[2.0] * 2, [4.0] * 3]
    kernels.foreach_copy_(tensors, [torch.zeros(2).bfloat16(), torch.ones(3)])
    assert [t.tolist() for t in tensors] == [[0.0] * 2, [1.0] * 3]
    assert [float(n) for n in kernels.foreach_norm(tensors, torch.inf)] == [0.0, 1.0]


@pytest.mark.parametrize(("found_inf", "scale", "tracker"), [(0.0, 4.0, 1), (1.0, 2.0, 0)])
def test_amp_update_scale(found_inf: float, scale: float, tracker: int) -> None:
    scales, trackers = torch.tensor(4.0), torch.zeros((), dtype=torch.int32)
    kernels.amp_update_scale_(scales, trackers, torch.tensor(found_inf), 2.0, 0.5, 3)
    assert (scales.item(), trackers.item()) == (scale, tracker)


def test_addmm_activation_adds_then_applies_relu() -> None:
    x, w, b = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    found = kernels.addmm_activation(b, x, w, use_gelu=False)
    torch.testing.assert_close(found, torch.addmm(b, x, w).relu(), rtol=0, atol=0)


def test_native_multi_head_attention_is_that_of_the_module() -> None:
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    found, _ = kernels.native_multi_head_attention(
        x, x, x, 8, 2, module.in_proj_weight, module.in_proj_bias,
        module.out_proj.weight, module.out_proj.bias, None, False,
    )  # fmt: skip
    torch.testing.assert_close(found, module(x, x, x, need_weights=False)[0])


def test_returns_alias_knows_views_and_in_place_ops() -> None:
    assert ops.returns_alias(aten.view.default)
    assert ops.returns_alias(aten.add_.Tensor)
    assert not ops.returns_alias(aten.add.Tensor)


def test_a_decomposition_can_be_left_to_the_table() -> None:
    def is_kept() -> bool:
        with enable_python_dispatcher():
            graph = make_fx(torch.nn.functional.hardshrink, tracing_mode="fake")(x).graph
        return op in {node.target for node in graph.nodes}

    op, x = aten.hardshrink.default, torch.ones(2, requires_grad=True)
    assert not is_kept()
    with ops.without_decompositions([op]):
        assert is_kept()
    assert not is_kept()


def test_lstm_is_the_op_without_a_fused_kernel(rng: torch.Generator) -> None:
    """``decompositions.one_layer_lstm`` and its helpers take the op's arguments."""
    net = torch.nn.LSTM(4, 3, 2, bidirectional=True)
    x = torch.randn(5, 2, 4, generator=rng)
    states = [torch.randn(4, 2, 3, generator=rng) for _ in range(2)]
    weights = [weight for layer in net.all_weights for weight in layer]
    given: Any = (x, states, weights, True, 2, 0.0, False, True, False)
    torch.testing.assert_close(lstm(*given), torch.lstm(*given))
