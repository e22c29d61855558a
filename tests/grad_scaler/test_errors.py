"""Misuse that torch's scaler does not notice, or reports without help: words that help, no harm.

``test_parity.py`` has the errors that are torch's own.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import amp_fx
from amp_fx import errors
from tests.grad_scaler.loops import make_params, set_scaled_grads


class Case:
    """A scaler with an optimizer whose gradients are ready."""

    def __init__(self) -> None:
        self.scaler = amp_fx.GradScaler("cpu", init_scale=8.0)
        self.params = make_params((3,))
        self.optimizer = torch.optim.SGD(self.params, lr=0.1)
        set_scaled_grads(self.scaler, self.params, None)


def test_a_positional_closure_does_not_slip_through() -> None:
    case = Case()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        case.scaler.step(case.optimizer, lambda: 0.0)
    case.scaler.step(case.optimizer, None)  # as Accelerate calls it


def test_an_update_without_a_step_says_what_is_missing() -> None:
    with pytest.raises(AssertionError, match=r"no optimizer was unscaled or stepped") as raised:
        Case().scaler.update()
    assert isinstance(raised.value, errors.ScalerStateError)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"init_scale": 0.0}, "init_scale must be between"),
        ({"init_scale": -1.0}, "above 0"),
        ({"init_scale": math.inf}, "finite"),
        ({"init_scale": math.nan}, "finite"),
        ({"init_scale": 1e-46}, "the range of float32"),  # 0.0 there
        ({"init_scale": "8"}, "finite"),
        ({"min_scale": 0.0}, "min_scale must be between"),
        ({"max_scale": 0.0}, "max_scale must be between"),
        ({"max_scale": math.nan}, "max_scale must be between"),
        ({"max_scale": 1.0, "min_scale": 2.0}, r"max_scale must be at least min_scale, 2\.0; got"),
        ({"hysteresis": 0}, "hysteresis must be an integer of at least 1"),
        ({"hysteresis": 1.5}, "hysteresis must be an integer of at least 1"),
        ({"hysteresis": True}, "hysteresis must be an integer of at least 1"),
    ],
    ids=str,
)
def test_constructor(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(errors.ScalerValueError, match=expected):
        amp_fx.GradScaler("cpu", **settings)


@pytest.mark.parametrize(
    "value",
    [0.0, -2.0, math.inf, math.nan, 1e-40, "8", True, torch.tensor(math.nan), torch.ones(2)],
    ids=str,
)
def test_bad_scales_change_nothing(value: Any) -> None:
    case = Case()
    case.scaler.unscale_(case.optimizer)
    before = case.scaler.state_dict()
    with pytest.raises(errors.ScalerValueError, match="new_scale must be"):
        case.scaler.update(value)
    assert case.scaler.state_dict() == before
    case.scaler.step(case.optimizer)
    case.scaler.update()


@pytest.mark.parametrize("entry", ["scale", "growth_factor", "_growth_tracker"])
def test_state_dicts_load_whole_or_not_at_all(entry: str) -> None:
    scaler = Case().scaler
    before = scaler.state_dict()
    state = {**before, "scale": 2.0, "growth_factor": 3.0, "growth_interval": 7}
    del state[entry]
    with pytest.raises(errors.ScalerStateDictError, match=f"missing .*'{entry}'"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(("max_norm", "norm_type"), [(-1.0, 2.0), (math.nan, 2.0), (1.0, math.nan)])
def test_bad_norms_leave_gradients_scaled(max_norm: float, norm_type: float) -> None:
    case = Case()
    assert case.params[0].grad is not None
    before = case.params[0].grad.clone()
    with pytest.raises(ValueError, match="norm"):
        case.scaler.unscale_and_clip_(case.optimizer, max_norm, norm_type)
    assert torch.equal(case.params[0].grad, before)
    with pytest.raises(ValueError, match="norm"):
        case.scaler.compile_step(case.optimizer, max_norm=max_norm, norm_type=norm_type)


@pytest.mark.parametrize("names", ["weight", ["weight"], [("weight", 3)], [(1, torch.ones(2))]])
def test_names(names: Any) -> None:
    with pytest.raises(errors.ScalerTypeError, match="pairs of name and parameter"):
        amp_fx.GradScaler("cpu", named_parameters=names)
    with pytest.raises(errors.ScalerTypeError):
        amp_fx.GradScaler("cpu").name_parameters(names)


def test_lbfgs_cannot_be_compiled() -> None:
    scaler = Case().scaler
    with pytest.raises(
        TypeError, match="LBFGS cannot be compiled, because its step needs a closure"
    ):
        scaler.compile_step(torch.optim.LBFGS(make_params((3,))))
