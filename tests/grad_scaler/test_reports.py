"""Reports on steps: what was skipped, because of which parameters, and when that is read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import amp_fx
from amp_fx.grad_scaler import Overflow
from tests.grad_scaler.loops import OPTIMIZERS, make_params, set_scaled_grads

STEPPED = ["adamw", "adamw-fused", "sgd-momentum"]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


def run(
    scaler: amp_fx.GradScaler,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    bad: dict[str, list[float]],
) -> None:
    """One iteration in which some gradients begin with these values."""
    scaler.scale(torch.ones(()))
    for name, param in model.named_parameters():
        param.grad = torch.ones_like(param)
        values = bad.get(name, [])
        param.grad.view(-1)[: len(values)] = torch.tensor(values)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("optimizer_name", STEPPED)
def test_last_step_names_and_counts(optimizer_name: str) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = amp_fx.GradScaler("cpu", named_parameters=model.named_parameters())
    assert scaler.last_step is None
    run(scaler, optimizer, model, {})
    assert scaler.last_step is not None
    assert not scaler.last_step.skipped
    assert scaler.last_step.overflows == ()
    run(
        scaler,
        optimizer,
        model,
        {"0.weight": [math.inf, -math.inf, math.nan], "1.bias": [math.nan]},
    )
    optimizer.zero_grad()
    assert scaler.last_step.skipped
    expected = (Overflow("0.weight", 2, 1, 6), Overflow("1.bias", 0, 1, 1))
    assert scaler.last_step.overflows == expected
    assert "0.weight (2 inf, 1 nan of 6), 1.bias (0 inf, 1 nan of 1)" in repr(scaler.last_step)
    run(scaler, optimizer, model, {})
    assert not scaler.last_step.skipped


def test_names_come_from_the_scaler_the_optimizer_or_the_place() -> None:
    model = make_model()
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [{"params": named[:2]}, {"params": named[2:]}]
    for optimizer, given, expected in (
        (torch.optim.SGD(groups, lr=0.1), [("mine", named[3][1])], ["1.weight", "mine"]),
        (
            torch.optim.SGD([{"params": [p]} for _, p in named], lr=0.1),
            [],
            ["param_groups[2]['params'][0]", "param_groups[3]['params'][0]"],
        ),
    ):
        scaler = amp_fx.GradScaler("cpu", named_parameters=given)
        run(scaler, optimizer, model, {"1.weight": [math.inf], "1.bias": [math.inf]})
        assert scaler.last_step is not None
        assert [overflow.name for overflow in scaler.last_step.overflows] == expected


def test_each_optimizer_has_its_report() -> None:
    scaler = amp_fx.GradScaler("cpu")
    reports = []
    for bad in (math.inf, None):
        params = make_params((2,))
        optimizer = torch.optim.SGD(params, lr=0.1)
        set_scaled_grads(scaler, params, bad)
        scaler.step(optimizer)
        reports.append(scaler.last_step)
    scaler.update()
    assert [report.skipped for report in reports if report] == [True, False]
    assert [len(report.overflows) for report in reports if report] == [1, 0]
