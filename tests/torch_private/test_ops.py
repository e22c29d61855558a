"""torch_private.ops and kernels: what is relied on."""

from __future__ import annotations

from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx.torch_private import kernels, ops
from amp_fx.torch_private.recurrent import lstm

aten = torch.ops.aten


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


def test_scaled_mm_multiplies_the_scales() -> None:
    a = torch.eye(16).to(torch.float8_e4m3fn)
    b = torch.full((16, 16), 2.0).to(torch.float8_e4m3fn)
    two = torch.tensor(2.0)
    out = kernels.scaled_mm(a, b.t(), scale_a=two, scale_b=two, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert (out == 8).all()


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
