"""Planted faults are found where they are; sound models have no suspect."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import amp_fx
from tests.numerics.faults import FAULTS, MODELS
from tests.numerics.faulty_parts import PARTS, model_with

HARMLESS = 1e-3
"""A fault that moves the loss by less, in some model, need not be found in it."""


def planted(model: str, fault: str | None) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = MODELS[model](None if fault is None else FAULTS[fault].make())
    return made


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_line_names_module_and_op_of_a_fault(name: str) -> None:
    fault, model = FAULTS[name], planted("bare", name)
    report = amp_fx.accuracy(model, dtype=fault.dtype)(*MODELS["bare"].inputs())
    first = report.suspects[0]
    assert (first.module, first.stage) == ("bad", fault.stage)
    assert first.op in fault.ops, str(first)
    assert first.file == __file__.replace("test_faults", "faults")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_faults_inside_of_models(model: str, every: int) -> None:
    harmful, right = [], []
    for name, fault in [*FAULTS.items()][::every]:
        report = amp_fx.accuracy(planted(model, name), dtype=fault.dtype)(*MODELS[model].inputs())
        assert report.loss is not None
        assert report.reference_loss is not None
        if abs(report.loss - report.reference_loss) < HARMLESS * abs(report.reference_loss):
            continue
        harmful.append(name)
        assert report.suspects, name
        assert report.suspects[0].module == MODELS[model].place, f"{name}: {report.suspects[0]}"
        right += [name] if report.suspects[0].op in fault.ops else []
    assert len(harmful) >= 16 // every
    assert len(right) >= 0.8 * len(harmful)


@pytest.mark.slow
@pytest.mark.parametrize("every", [6, 1])
def test_parts_computed_by_hand(every: int) -> None:
    """Compares loss and gradients; in some parts, only the gradients are wrong."""
    some = [*PARTS.items()][::every]
    right = []
    for name, part in some:
        model, inputs = model_with(part)
        report = amp_fx.accuracy(model, dtype=part.dtype, scale=part.scale)(*inputs)
        assert report.error is not None
        moved = abs(report.error) / abs(report.reference_loss or 1.0)
        assert not moved < HARMLESS or not report.gradient_error < 0.1, f"{name} does no harm"
        first = report.suspects[0]
        assert (first.module, first.stage) == (part.place, part.stage), f"{name}: {first}"
        right += [name] if first.op in part.ops else []
    assert len(right) >= 0.8 * len(some), {*dict(some)} - {*right}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["gpt", "resnet"])
def test_models_of_sound_parts_have_no_suspect(kind: str, dtype: str) -> None:
    model, inputs = model_with(None, kind)
    report = amp_fx.accuracy(model, dtype=dtype)(*inputs)
    assert report.suspects == ()
    assert report.gradient_error < 0.04


def test_few_tokens_with_another_expert_are_no_fault() -> None:
    """Routes few tokens differently by chance, which moves all tokens after sorting."""
    torch.manual_seed(0)
    gate, experts = nn.Linear(32, 4), nn.Parameter(torch.randn(4, 32, 32) / 6)

    def step(x: torch.Tensor) -> torch.Tensor:
        probabilities = gate(x).float().softmax(-1)
        expert = probabilities.argmax(-1)
        order = expert.argsort(stable=True)
        mixed = (x[order][:, None] @ experts[expert[order]])[:, 0]
        back = torch.zeros_like(x, dtype=mixed.dtype).index_put((order,), mixed)
        result: torch.Tensor = x + back * probabilities.amax(-1, keepdim=True)
        return result.square().mean()

    report = amp_fx.accuracy(step)(torch.randn(512, 32))
    assert 0 < next(n.flips for n in report.nodes if n.flips) < 12
    assert max(n.accumulated for n in report.nodes if n.label == "index") > 0.5
    assert report.suspects == ()


def test_an_index_made_of_a_rounded_value_is_a_fault() -> None:
    table, w = torch.randn(4096), torch.randn(16, 16, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        return table[((x @ w).sigmoid() * 4000).long()].square().mean()

    report = amp_fx.accuracy(step)(torch.randn(32, 16))
    assert report.suspects[0].kind == "growth"
    assert report.suspects[0].op in ("mul", "sigmoid")


def test_a_loss_next_to_zero_has_no_suspect() -> None:
    """Measures a loss like that of policy gradients, whose advantages have a mean of zero."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 6)), torch.randn(64, 16)
    advantages = torch.randn(64)
    advantages -= advantages.mean()
    before = net(x).log_softmax(-1)[:, 0].detach()

    def step(x: torch.Tensor) -> torch.Tensor:
        ratio = (net(x).log_softmax(-1)[:, 0] - before).exp()
        result: torch.Tensor = -(ratio * advantages).mean()
        return result

    report = amp_fx.accuracy(step)(x)
    assert abs(report.reference_loss or 0.0) < 1e-6
    assert report.suspects == ()


def test_gradients_that_a_larger_scale_keeps_are_no_fault() -> None:
    net, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(64, 32)

    def step(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = net(x).float().square().mean() * 1e-6
        return result

    report = amp_fx.accuracy(step, dtype="float16")(x)
    assert report.flushed_gradients > 0.5
    assert report.largest_scale > report.scale
    assert report.suspects == ()


def test_statistics_that_a_norm_keeps_for_its_backward_are_not_its_result() -> None:
    """Normalizes two values exactly, although the inverse of their difference has an error."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32))
    x = torch.randn(2, 3, 1, 1)
    x[1] = x[0] * 1.01
    report = amp_fx.accuracy(net, loss=lambda out: out[:, :16].square().mean())(x)
    [norm] = [n for n in report.nodes if n.op == "batch_norm" and n.stage == "forward"]
    assert norm.max_abs <= 1.0
    assert norm.numel == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", MODELS)
def test_sound_models_have_no_suspect_and_effects_add_up(model: str, dtype: str) -> None:
    report = amp_fx.accuracy(planted(model, None), dtype=dtype)(*MODELS[model].inputs())
    assert report.suspects == ()
    assert report.error is not None
    assert report.reference_loss is not None
    if abs(report.error) > 1e-5 * report.reference_loss:
        assert report.predicted_error == pytest.approx(report.error, rel=0.05)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["long_sum", "difference_of_near_values"])
def test_a_repair_takes_the_suspect_away(name: str) -> None:
    model, inputs = planted("bare", name), MODELS["bare"].inputs()
    before = amp_fx.accuracy(model)(*inputs)
    bad = model.get_submodule("bad")
    forward = bad.forward

    def in_float32(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            result: torch.Tensor = forward(x.float())
            return result

    bad.forward = in_float32
    after = amp_fx.accuracy(model)(*inputs)
    assert [suspect.module for suspect in before.suspects] == ["bad"]
    assert after.suspects == ()
    assert after.error is not None
    assert before.error is not None
    assert abs(after.error) < abs(before.error) / 10


def test_a_mask_that_becomes_infinite_is_no_fault_until_it_makes_nans() -> None:
    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = x @ x.mT
        return (scores + (mask.to(scores.dtype) * -1e9)).softmax(-1).square().mean()

    x = torch.randn(2, 8, 8)
    some = torch.ones(8, 8).triu(1)
    fine = amp_fx.accuracy(step, dtype="float16")(x, some)
    assert fine.loss is not None
    assert math.isfinite(fine.loss)
    assert fine.suspects == ()
    rows = some.clone()
    rows[0] = 1
    broken = amp_fx.accuracy(step, dtype="float16")(x, rows)
    assert math.isnan(broken.loss or 0.0)
    assert (broken.suspects[0].kind, broken.suspects[0].op) == ("overflow", "mul")


def test_where_the_reference_has_a_nan_already() -> None:
    linear = nn.Linear(8, 8)
    report = amp_fx.accuracy(lambda x: (linear(x) - 100).log().mean())(torch.randn(4, 8))
    assert report.reference_problem is not None
    assert report.reference_problem.op == "log"
    assert report.suspects == ()
    assert "float32 itself becomes infinite or NaN: first log" in str(report)


def test_a_loss_that_is_not_a_number_has_no_error_of_the_gradients() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        cubes: torch.Tensor = (300 * linear(x)).pow(3)
        return (cubes - cubes).sum()

    report = amp_fx.accuracy(step, dtype="float16")(torch.randn(4, 8))
    assert report.loss is not None
    assert math.isnan(report.loss)
    assert "error of the gradients" not in str(report)
    assert "the loss is nan" in str(report)
