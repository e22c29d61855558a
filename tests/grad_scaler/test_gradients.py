"""Gradients of every kind: dtypes, sparse ones, empty ones, missing ones."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import amp_fx
from amp_fx import errors
from tests.grad_scaler.loops import OPTIMIZERS, make_params, set_scaled_grads


def make_scaler(scale: float = 8.0, **settings: Any) -> amp_fx.GradScaler:
    scaler = amp_fx.GradScaler("cpu", init_scale=scale, **settings)
    scaler.scale(torch.ones(()))
    return scaler


def sgd(*grads: Tensor | None) -> torch.optim.Optimizer:
    """Returns an optimizer whose parameters have these gradients."""
    params = []
    for grad in grads:
        shape, dtype = (grad.shape, grad.dtype) if grad is not None else ((2,), torch.float32)
        params.append(torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        params[-1].grad = grad
    return torch.optim.SGD(params, lr=1.0)


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("where", range(5))
def test_mixed_dtypes_are_unscaled_and_checked_together(bad: float | None, where: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex64)
    grads = [torch.full((3,), 16.0).to(dtype) for dtype in dtypes]
    if bad is not None:
        grads[where][1] = bad
    scaler, optimizer = make_scaler(), sgd(*grads)
    scaler.step(optimizer)
    for grad in grads:
        assert grad[0] == 2.0
    stepped = torch.tensor(-2.0 if bad is None else 0.0)
    assert all(p[0] == stepped for p in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("is_noncontiguous", [False, True])
def test_missing_empty_and_strided_gradients(is_noncontiguous: bool) -> None:
    grad = torch.full((3, 4), 16.0)
    grad = grad.t() if is_noncontiguous else grad
    scaler = make_scaler()
    scaler.unscale_(sgd(None, torch.zeros(0), grad, torch.tensor(16.0)))
    assert (grad == 2.0).all()


class OwnWay(torch.optim.SGD):
    """Steps in a way that asks for no gradients."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.add_(1.0)
        return "stepped"


@pytest.mark.parametrize("call", ["step", "unscale_", "unscale_and_clip_"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_without_gradients_the_optimizer_steps_its_own_way(call: str, is_fused: bool) -> None:
    scaler, param = make_scaler(growth_interval=1), torch.nn.Parameter(torch.zeros(2))
    optimizer = OwnWay([param], lr=1.0, fused=is_fused)
    if call != "step":
        getattr(scaler, call)(optimizer, *([1.0] if call == "unscale_and_clip_" else []))
    assert scaler.step(optimizer) == "stepped"
    assert param.tolist() == [1.0, 1.0]
    assert scaler.last_step is not None
    assert not scaler.last_step.skipped
    scaler.update()
    assert scaler.get_scale() == 8.0
    scaler.step(sgd(torch.tensor([1.0])))
    scaler.update()
    assert scaler.get_scale() == 16.0  # a step with gradients is what shows the scale to be good


@pytest.mark.parametrize(("bad", "expected"), [(1.0, 16.0), (math.nan, 4.0)])
def test_an_optimizer_without_gradients_leaves_the_decision_to_another(
    bad: float, expected: float
) -> None:
    scaler = make_scaler(growth_interval=2)
    for _ in range(2 if bad == 1.0 else 1):
        assert scaler.get_scale() == 8.0
        scaler.step(sgd(torch.tensor([1.0, bad])))
        assert scaler.step(OwnWay(make_params((2,)), lr=1.0)) == "stepped"
        scaler.update()
    assert scaler.get_scale() == expected


def sparse(values: list[float], dtype: torch.dtype) -> Tensor:
    """Index 1 twice: what an embedding that saw a word twice gets."""
    return torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]), torch.tensor(values, dtype=dtype), (5,), check_invariants=True
    )


def test_sparse_gradients() -> None:
    scaler, optimizer = make_scaler(), sgd(sparse([8.0, 16.0, 24.0], torch.float32))
    scaler.step(optimizer)
    (param,) = optimizer.param_groups[0]["params"]
    assert param.tolist() == [0.0, -3.0, 0.0, -3.0, 0.0]
    scaler.update()
    param.grad = sparse([8.0, math.inf, 24.0], torch.float32)
    scaler.step(optimizer)
    assert param.tolist() == [0.0, -3.0, 0.0, -3.0, 0.0]
    assert scaler.last_step is not None
    assert [(o.num_inf, o.num_nan) for o in scaler.last_step.overflows] == [(1, 0)]


def test_sparse_float16_overflows_where_duplicates_add_up() -> None:
    scaler = make_scaler(allow_fp16=True)
    scaler.unscale_(sgd(sparse([40000.0, 40000.0, 1.0], torch.float16)))
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_the_norm_of_sparse_gradients_counts_duplicates_once() -> None:
    scaler = make_scaler()
    optimizer = sgd(sparse([8.0, 16.0, 32.0], torch.float32), torch.tensor([96.0]))
    norm = scaler.unscale_and_clip_(optimizer, 1.0)
    assert norm.item() == 13.0  # 3, 4, 12
    embedding, other = optimizer.param_groups[0]["params"]
    torch.testing.assert_close(embedding.grad.to_dense()[[1, 3]], torch.tensor([3.0, 4.0]) / 13.0)
    torch.testing.assert_close(other.grad, torch.tensor([12.0]) / 13.0)


def test_float16_gradients_raise_and_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).half())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for param in model.parameters():
        param.grad = torch.full_like(param, 8.0)
    scaler = make_scaler(named_parameters=model.named_parameters())
    with pytest.raises(ValueError, match=r"FP16 gradients.*1\.weight, 1\.bias\."):
        scaler.unscale_(optimizer)
    assert all((p.grad == 8.0).all() for p in model.parameters() if p.grad is not None)
    with pytest.raises(errors.OptionError):
        scaler.step(optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_unscaling_by_a_small_scale_overflows_and_is_noticed(optimizer: str) -> None:
    params = make_params((2,))
    stepped = OPTIMIZERS[optimizer](params)
    before = params[0].detach().clone()
    scaler = make_scaler(2.0**-10)
    params[0].grad = torch.tensor([1e36, 1.0])  # finite, but not after unscaling
    scaler.step(stepped)
    assert scaler.last_step is not None
    assert [(o.num_inf, o.num_nan, o.numel) for o in scaler.last_step.overflows] == [(1, 0, 2)]
    scaler.update()
    assert torch.equal(params[0], before)
    assert scaler.get_scale() == 2.0**-11


@pytest.mark.parametrize("scale", [1.0, 3.0, 1000.0, 1e-3, 7.3e20, 2.0**16])
def test_unscaling_rounds_as_torch_does(scale: float) -> None:
    results = []
    for scaler_class in (amp_fx.GradScaler, torch.amp.GradScaler):
        scaler, params = scaler_class("cpu", init_scale=scale), make_params((1000,))
        set_scaled_grads(scaler, params, None)
        scaler.unscale_(torch.optim.SGD(params, lr=1.0))
        results.append(params[0].grad)
    assert torch.equal(results[0], results[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["unscale_", "unscale_and_clip_"])
def test_differentiable_gradients(call: str) -> None:
    """Unscales gradients of a gradient penalty without changing their autograd history."""
    x = torch.nn.Parameter(torch.tensor(3.0))
    scaler = make_scaler()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, once a process, of cycles that this test breaks
        scaler.scale(x**2).backward(create_graph=True)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    history = x.grad.grad_fn
    optimizer = torch.optim.SGD([x], lr=1.0)
    getattr(scaler, call)(optimizer, *([1e9, 3.0] if call == "unscale_and_clip_" else []))
    assert x.grad.item() == 6.0
    assert x.grad.grad_fn is history
    x.grad = None


def test_gradients_are_let_go() -> None:
    """Checks that the scaler holds no reference to gradients that ``zero_grad`` frees."""
    scaler, params = amp_fx.GradScaler("cpu"), make_params((3,))
    optimizer = torch.optim.AdamW(params, lr=1.0)
    for bad in (None, math.inf):
        set_scaled_grads(scaler, params, bad)
        assert params[0].grad is not None
        storage = weakref.ref(params[0].grad.untyped_storage())
        scaler.unscale_and_clip_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        gc.collect()
        assert storage() is None


def test_an_optimizer_that_died_is_not_taken_for_the_next() -> None:
    """Counts the overflow that a dead optimizer found, even if the next one has the same id."""
    scaler, params = make_scaler(), make_params((3,))
    for _ in range(20):
        set_scaled_grads(scaler, params, math.inf)
        scaler.unscale_(torch.optim.SGD(params, lr=1.0))
        gc.collect(0)
    scaler.update()
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("bad", [None, math.inf])
def test_dtypes_without_a_kernel_are_unscaled_in_float32(
    bad: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unscales in float32 if torch has no kernel; CUDA has none for bfloat16."""
    kernel = torch._amp_foreach_non_finite_check_and_unscale_

    def without_bfloat16(grads: list[Tensor], *args: Tensor) -> None:
        if grads[0].dtype is torch.bfloat16:
            raise NotImplementedError("not implemented for 'BFloat16'")
        kernel(grads, *args)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", without_bfloat16)
    grads = [torch.full((2,), 24.0, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    if bad is not None:
        grads[0][1] = bad
    scaler = make_scaler()
    scaler.unscale_(sgd(*grads))
    assert [grad[0].item() for grad in grads] == [3.0, 3.0]
    assert grads[0].dtype is torch.bfloat16
    scaler.update()
    assert scaler.get_scale() == (8.0 if bad is None else 4.0)
