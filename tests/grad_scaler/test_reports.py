"""The scaler tells: what was skipped, because of what, and what that means for schedules."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import amp_fx
from amp_fx import errors
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


def test_history() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp_fx.GradScaler(
        "cpu",
        init_scale=8.0,
        growth_interval=2,
        history_size=4,
        named_parameters=model.named_parameters(),
    )
    for bad in ({}, {"1.bias": [math.inf]}, {}, {}, {"0.bias": [math.nan]}):
        run(scaler, optimizer, model, bad)
    scaler.update(32.0)
    records = scaler.history()
    assert [(r.scale, r.new_scale, r.skipped) for r in records] == [
        (4.0, 4.0, False),
        (4.0, 8.0, False),
        (8.0, 4.0, True),
        (4.0, 32.0, False),
    ]
    assert [[o.name for o in r.overflows] for r in records] == [[], [], ["0.bias"], []]


def test_history_can_be_off() -> None:
    model = make_model()
    scaler = amp_fx.GradScaler("cpu", history_size=0)
    run(scaler, torch.optim.SGD(model.parameters(), lr=0.1), model, {})
    assert scaler.history() == []


def test_an_update_remembers_all_its_optimizers() -> None:
    scaler = amp_fx.GradScaler("cpu")
    params = [make_params((2,)), make_params((2,))]
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in params]
    for p, optimizer, bad in zip(params, optimizers, (math.inf, None), strict=True):
        set_scaled_grads(scaler, p, bad)
        scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step is not None
    assert not scaler.last_step.skipped
    (record,) = scaler.history()
    assert record.skipped
    assert len(record.overflows) == 1


@pytest.mark.parametrize("optimizer_name", STEPPED)
@pytest.mark.parametrize("update_first", [False, True])
def test_schedulers_step_only_with_their_optimizer(optimizer_name: str, update_first: bool) -> None:
    scaler = amp_fx.GradScaler("cpu")
    params = [make_params((2,)), make_params((2,))]
    optimizers = [OPTIMIZERS[optimizer_name](p) for p in params]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    for i, bad in enumerate((None, math.inf)):
        set_scaled_grads(scaler, params[i], bad)
        scaler.step(optimizers[i])
    if update_first:
        scaler.update()
    assert [scaler.step_scheduler(scheduler) for scheduler in schedulers] == [True, False]
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.05, 0.1]


def test_scheduler_arguments_are_passed_on() -> None:
    scaler, params = amp_fx.GradScaler("cpu"), make_params((2,))
    optimizer = torch.optim.SGD(params, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 2.0):
        set_scaled_grads(scaler, params, None)
        scaler.step(optimizer)
        scaler.update()
        scaler.step_scheduler(scheduler, loss)
    assert optimizer.param_groups[0]["lr"] == 0.5


def collapse_warnings(scaler: amp_fx.GradScaler, bad: list[str]) -> list[str]:
    model = make_model()
    scaler.name_parameters(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in bad:
            run(scaler, optimizer, model, {name: [math.nan]})
    assert all(w.category is errors.ScaleCollapseWarning for w in caught)
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def test_a_collapse_is_told_once_and_names_the_culprits() -> None:
    messages = collapse_warnings(amp_fx.GradScaler("cpu"), ["1.weight"] * 200)
    assert len(messages) == 1
    assert "1.weight (0 inf, 1 nan of 3)" in messages[0]


@pytest.mark.parametrize("scale", [2.0**16, 4.0, 0.25])
def test_settling_is_no_collapse(scale: float) -> None:
    scaler = amp_fx.GradScaler("cpu", init_scale=scale, growth_interval=1)
    assert collapse_warnings(scaler, (["1.weight"] * 15 + ["none"] * 20) * 3) == []


def steps_of_a_loss(dtype: torch.dtype, *, num: int, init_scale: float, factor: float) -> Any:
    """Steps with a loss of a product in float16, whose sum is taken in a dtype."""
    weight = torch.nn.Parameter(torch.full((4,), factor, dtype=torch.float16))
    master = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([master], lr=0.01)
    scaler = amp_fx.GradScaler("cpu", init_scale=init_scale)
    for _ in range(num):
        optimizer.zero_grad()
        scaler.scale((master.half() * weight.detach()).to(dtype).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize(("init_scale", "num"), [(2.0**16, 1), (2.0**15, 3)])
def test_a_float16_loss_whose_first_steps_overflow_is_told_of_once(
    init_scale: float, num: int
) -> None:
    with pytest.warns(errors.Float16LossWarning, match="the loss itself is float16") as found:
        scaler = steps_of_a_loss(torch.float16, num=num + 2, init_scale=init_scale, factor=1e4)
    assert len(found) == 1
    assert scaler.last_step.skipped


def test_a_float32_loss_is_not_to_blame() -> None:
    steps_of_a_loss(torch.float32, num=4, init_scale=2.0**16, factor=1e4)


def test_a_float16_loss_that_overflows_after_a_good_step_is_not_to_blame() -> None:
    scaler = steps_of_a_loss(torch.float16, num=1, init_scale=2.0, factor=1.0)
    assert not scaler.last_step.skipped
    master = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([master])
    for _ in range(4):
        scaler.scale((master.half() * math.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.last_step.skipped
