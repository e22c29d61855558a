"""Fused steps do not wait for the device, except for their first; others wait once.

``tests/gpu`` has the same on a device.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch

import amp_fx
from tests.grad_scaler import on_device
from tests.grad_scaler.loops import OPTIMIZERS, make_params, set_scaled_grads, snapshot
from tests.grad_scaler.on_device import NoReads


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device.pretend(monkeypatch)


def iterate(scaler: amp_fx.GradScaler, optimizer: Any, call: str) -> None:
    if call == "unscale":
        scaler.unscale_(optimizer)
    elif call == "clip":
        scaler.unscale_and_clip_(optimizer, 0.5)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("optimizer_name", ["adamw-fused", "sgd-fused", "adagrad-fused"])
@pytest.mark.parametrize("call", ["step", "unscale", "clip"])
def test_fused_steps_read_nothing(optimizer_name: str, call: str) -> None:
    """Compares the results with those of torch's scaler, too."""
    results = []
    for kind in (amp_fx.GradScaler, torch.amp.GradScaler):
        params = make_params((4, 3), (5,))
        optimizer = OPTIMIZERS[optimizer_name](params)
        scaler: Any = kind("cpu", growth_interval=2)
        for seed, bad in enumerate((None, None, math.inf, None, math.nan, None, None)):
            set_scaled_grads(scaler, params, bad, seed)
            if kind is amp_fx.GradScaler:
                allocates_momentum = optimizer_name == "sgd-fused" and seed == 0
                with contextlib.nullcontext() if allocates_momentum else NoReads():
                    iterate(scaler, optimizer, call)
                continue
            if call != "step":
                scaler.unscale_(optimizer)
            if call == "clip":
                torch.nn.utils.clip_grad_norm_(params, 0.5)
            scaler.step(optimizer)
            scaler.update()
        for param in params:
            param.grad = None
        results.append(snapshot(scaler, [p.detach() for p in params], optimizer))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def overflown(optimizer_name: str) -> tuple[amp_fx.GradScaler, Any, list[torch.Tensor]]:
    """Returns a scaler, an optimizer and parameters whose gradients have overflown."""
    params = make_params((4, 3), (5,))
    scaler = amp_fx.GradScaler("cpu")
    set_scaled_grads(scaler, params, math.inf)
    return scaler, OPTIMIZERS[optimizer_name](params), params


def test_other_optimizers_read_one_value_a_step() -> None:
    scaler, optimizer, _ = overflown("sgd-momentum")
    with NoReads():
        scaler.unscale_(optimizer)
        with pytest.raises(AssertionError, match="a value was read"):
            scaler.step(optimizer)


def test_reports_are_read_when_asked_for() -> None:
    scaler, optimizer, _ = overflown("adamw-fused")
    with NoReads():
        iterate(scaler, optimizer, "step")
        report = scaler.last_step
        assert repr(report) == "StepReport(skipped=<on the device>, overflows=[])"
    assert report is not None
    assert report.skipped
    assert [overflow.num_inf for overflow in report.overflows] == [1]


@pytest.mark.parametrize("how", ["cleared", "next iteration"])
def test_other_gradients_are_not_taken_for_those_of_the_step(how: str) -> None:
    scaler, optimizer, params = overflown("adamw-fused")
    iterate(scaler, optimizer, "step")
    report = scaler.last_step
    assert report is not None
    if how == "cleared":
        optimizer.zero_grad()
    else:
        set_scaled_grads(scaler, params, math.nan)
    assert report.skipped
    assert report.overflows == ()


def test_an_optimizer_that_waits_names_parameters_before_gradients_are_cleared() -> None:
    scaler, optimizer, _ = overflown("sgd-momentum")
    scaler.step(optimizer)
    optimizer.zero_grad()
    assert scaler.last_step is not None
    assert [overflow.num_inf for overflow in scaler.last_step.overflows] == [1]


def test_small_scales_are_noticed_without_reading_them() -> None:
    """Finds a finite gradient that overflows when unscaled, although the host knows no scale."""
    params = make_params((2,))
    optimizer = OPTIMIZERS["adamw-fused"](params)
    scaler = amp_fx.GradScaler("cpu", init_scale=4.0, backoff_factor=0.1)
    before = params[0].detach().clone()
    for grad in (math.inf, math.inf, math.inf, math.inf, 1e37):  # 4e-4, and 1e37 / 4e-4 overflows
        scaler.scale(torch.ones(()))
        params[0].grad = torch.tensor([grad, 1.0])
        with NoReads():
            scaler.step(optimizer)
            scaler.update()
    assert torch.equal(params[0], before)
    assert scaler.get_scale() == pytest.approx(4e-5)
    assert scaler.last_step is not None
    assert [(o.num_inf, o.num_nan) for o in scaler.last_step.overflows] == [(1, 0)]
