"""Planted faults are found where they are; sound models have no suspect."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import amp_fx
from tests.numerics.faults import FAULTS, MODELS

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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", MODELS)
def test_sound_models_have_no_suspect_and_effects_add_up(model: str, dtype: str) -> None:
    report = amp_fx.accuracy(planted(model, None), dtype=dtype)(*MODELS[model].inputs())
    assert report.suspects == ()
    assert report.error is not None
    assert report.reference_loss is not None
    if abs(report.error) > 1e-5 * report.reference_loss:
        assert report.predicted_error == pytest.approx(report.error, rel=0.05)


@pytest.mark.parametrize("name", ["long_sum", "difference_of_near_values"])
def test_a_repair_takes_the_suspect_away(name: str) -> None:
    model, inputs = planted("bare", name), MODELS["bare"].inputs()
    before = amp_fx.accuracy(model)(*inputs)
    after = amp_fx.accuracy(model, policy=before.mended())(*inputs)
    assert before.diff(after).gone == before.suspects
    assert after.error is not None
    assert before.error is not None
    assert abs(after.error) < abs(before.error) / 10
    assert "gone: bad" in str(before.diff(after))


def test_a_mask_that_becomes_infinite_is_no_fault_until_it_makes_nans() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scores = x @ x.mT
            return (scores + (mask.to(scores.dtype) * -1e9)).softmax(-1).square().mean()

    x = torch.randn(2, 8, 8)
    some = torch.ones(8, 8).triu(1)
    fine = amp_fx.accuracy(Masked(), dtype="float16")(x, some)
    assert fine.loss is not None
    assert math.isfinite(fine.loss)
    assert fine.suspects == ()
    rows = some.clone()
    rows[0] = 1
    broken = amp_fx.accuracy(Masked(), dtype="float16")(x, rows)
    assert math.isnan(broken.loss or 0.0)
    assert (broken.suspects[0].kind, broken.suspects[0].op) == ("overflow", "mul")


def test_where_the_reference_has_a_nan_already() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = (self.fc(x) - 100).log().mean()
            return result

    report = amp_fx.accuracy(Net())(torch.randn(4, 8))
    assert report.reference_problem is not None
    assert report.reference_problem.op == "log"
    assert report.suspects == ()
    assert "float32 itself becomes infinite or NaN: first log" in str(report)
