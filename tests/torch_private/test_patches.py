"""Patches of torch: programs whose backward inductor gets wrong, or cannot compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.torch_private.patches import repaired_inductor, without_metadata_guards

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")


def program(x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    y = functional.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)
    conv = functional.conv2d(y[:, :, 1:7, 1:8], weight, padding=1)
    pool = functional.max_pool2d(conv, kernel_size=3, stride=1, padding=1)
    return torch.where(mask, conv, pool)


def gradient(*, compiled: bool) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, 4, 8, generator=rng).requires_grad_()
    weight = torch.randn(4, 3, 3, 3, generator=rng)
    mask = torch.rand(1, 4, 5, 7, generator=rng) > 0.5
    run = torch.compile(program) if compiled else program
    run(x, weight, mask).square().sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


def test_gradients_behind_a_scatter_are_right() -> None:
    with repaired_inductor():
        found = gradient(compiled=True)
    torch.testing.assert_close(found, gradient(compiled=False), rtol=1e-4, atol=1e-3)


def test_sparse_gradients_can_be_compiled() -> None:
    weight = torch.eye(4, requires_grad=True)

    @torch.compile
    def program(index: torch.Tensor) -> torch.Tensor:
        return functional.embedding(index, weight, sparse=True)[:, :2]

    with repaired_inductor():
        program(torch.tensor([1, 1, 2])).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.is_sparse
    assert weight.grad.to_dense()[:, :2].tolist() == [[0, 0], [2, 2], [1, 1], [0, 0]]


def test_metadata_of_traced_tensors_adds_no_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    mode, suppressed = FakeTensorMode(shape_env=ShapeEnv()), []

    def extract(_: torch.Tensor) -> None:
        assert mode.shape_env is not None
        suppressed.append(bool(mode.shape_env._suppress_guards_tls()))

    monkeypatch.setattr(proxy_tensor, "_extract_tensor_metadata", extract)
    gm = proxy_tensor.make_fx(lambda x: x * 2, tracing_mode="fake")
    gm(torch.ones(2))
    with without_metadata_guards(mode):
        gm(torch.ones(2))
    half = len(suppressed) // 2
    assert half > 0
    assert suppressed == [False] * half + [True] * half


@pytest.mark.parametrize("has_grad", [False, True])
def test_results_of_ops_that_change_nothing_are_copies(*, has_grad: bool) -> None:
    """Callers may write to them. They are neither weights, nor inputs, nor each other."""
    layer = torch.nn.Linear(4, 4)

    def program(x: torch.Tensor) -> Any:
        y = layer(x)
        return layer.bias + 0, layer.weight * 1, layer.weight.view(-1) + 0, x - 0, y, y * 1

    x = torch.randn(2, 4, requires_grad=has_grad)
    with torch.set_grad_enabled(has_grad):
        results = torch.compile(program, backend="amp_fx")(x)
    memory = [t.untyped_storage().data_ptr() for t in (*layer.parameters(), x, *results)]
    assert len({*memory}) == len(memory)
    if has_grad:
        found = torch.autograd.grad([r.sum() for r in results], x)
        expected = torch.autograd.grad([r.sum() for r in program(x)], x)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
