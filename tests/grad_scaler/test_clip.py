"""`unscale_and_clip_` is `unscale_` and torch.nn.utils.clip_grad_norm_."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import amp_fx
from tests.grad_scaler.loops import OPTIMIZERS, make_params, set_scaled_grads

SHAPES = ((40, 30), (50,), (), (0,))


def clip_both(
    scale: float,
    max_norm: float,
    norm_type: float,
    values: list[float],
    dtype: torch.dtype = torch.float32,
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Norm and gradients, ours and torch's; `values` replace the first unscaled gradients."""
    results = []
    for is_ours in (True, False):
        params = make_params(*shapes, dtype=dtype)
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = amp_fx.GradScaler("cpu", init_scale=scale)
        set_scaled_grads(scaler, params, None)
        assert params[0].grad is not None
        params[0].grad.view(-1)[: len(values)] = torch.tensor(values, dtype=dtype) * scale
        if is_ours:
            norm = scaler.unscale_and_clip_(optimizer, max_norm, norm_type)
        else:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        results.append([norm, *(param.grad for param in params if param.grad is not None)])
    return results[0], results[1]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, 0.5, 0.0])
@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e9, math.inf])
@pytest.mark.parametrize("values", [[], [math.inf], [math.nan], [math.inf, math.nan]])
def test_same_norm_and_gradients(norm_type: float, max_norm: float, values: list[float]) -> None:
    ours, theirs = clip_both(2.0**16, max_norm, norm_type, values)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize(("max_norm", "norm_type"), [(torch.tensor(0.1), 2.0), (0.1, "inf")])
def test_whatever_clip_grad_norm_takes(max_norm: Any, norm_type: Any) -> None:
    torch.testing.assert_close(*clip_both(2.0**16, max_norm, norm_type, [], shapes=SHAPES[:2]))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 0.0), (torch.float64, 1e-14)])
def test_powers_of_two_change_no_bit_and_float64_keeps_its_digits(
    dtype: torch.dtype, rtol: float
) -> None:
    torch.testing.assert_close(*clip_both(2.0**16, 0.1, 2.0, [], dtype), rtol=rtol, atol=0)


def test_largest_element() -> None:
    """Compares with a known answer, because torch has no largest element of empty gradients."""
    params = make_params((3,), (0,))
    scaler = amp_fx.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    params[0].grad, params[1].grad = torch.tensor([8.0, -32.0, 16.0]), torch.zeros(0)
    norm = scaler.unscale_and_clip_(torch.optim.SGD(params, lr=0.1), 2.0, math.inf)
    assert norm.item() == 4.0
    torch.testing.assert_close(params[0].grad, torch.tensor([0.5, -2.0, 1.0]))


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(
    scale=st.sampled_from([2.0**-60, 2.0**-3, 1.0, 3.0, 2.0**16, 2.0**60, 2.0**100]),
    max_norm=st.sampled_from([1e-3, 1.0, 1e15]),
    norm_type=st.sampled_from([1.0, 2.0]),
    size=st.sampled_from([1e-15, 1e-4, 1.0, 1e5, 1e15]),
)
def test_any_scale_and_size(scale: float, max_norm: float, norm_type: float, size: float) -> None:
    """Computes a finite norm, although that of the *scaled* gradients may overflow or vanish."""
    hypothesis.assume(size * scale < 1e37)
    ours, theirs = clip_both(scale, max_norm, norm_type, [size, -size, size])
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)


def test_low_precision_gradients_have_a_float32_norm() -> None:
    """Computes the norm in float32, because float16 ends at 65504."""
    params = make_params((64,), dtype=torch.float16)
    scaler = amp_fx.GradScaler("cpu", init_scale=1024.0, allow_fp16=True)
    scaler.scale(torch.ones(()))
    params[0].grad = torch.full((64,), 32768.0, dtype=torch.float16)
    norm = scaler.unscale_and_clip_(torch.optim.SGD(params, lr=0.1), 1.0)
    assert norm.dtype is torch.float32
    assert norm.item() == 256.0
    torch.testing.assert_close(params[0].grad, torch.full((64,), 0.125, dtype=torch.float16))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_step_uses_the_clipped_gradients_once(optimizer: str) -> None:
    results = []
    for is_ours in (True, False):
        params = make_params((4, 3), (5,))
        scaler = amp_fx.GradScaler("cpu") if is_ours else torch.amp.GradScaler("cpu")
        stepped = OPTIMIZERS[optimizer](params)
        for seed, bad in enumerate((None, math.inf, None, None)):
            set_scaled_grads(scaler, params, bad, seed)
            if isinstance(scaler, amp_fx.GradScaler):
                scaler.unscale_and_clip_(stepped, 0.5)
            else:
                scaler.unscale_(stepped)
                torch.nn.utils.clip_grad_norm_(params, 0.5)
            scaler.step(stepped)
            scaler.update()
        results.append([*params, torch.tensor(scaler.get_scale())])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_overflows_are_counted_before_clipping_smears_them() -> None:
    """Counts before clipping: one NaN makes the norm NaN, and clipping makes every gradient NaN."""
    params = make_params((4,), (3,))
    scaler = amp_fx.GradScaler("cpu")
    optimizer = torch.optim.SGD(params, lr=0.1)
    set_scaled_grads(scaler, params, math.nan)
    scaler.unscale_and_clip_(optimizer, 1.0)
    scaler.step(optimizer)
    assert scaler.last_step is not None
    assert [(o.num_inf, o.num_nan) for o in scaler.last_step.overflows] == [(0, 1)]


def test_no_gradients() -> None:
    scaler = amp_fx.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    assert scaler.unscale_and_clip_(torch.optim.SGD(make_params((3,)), lr=0.1), 1.0).item() == 0.0
