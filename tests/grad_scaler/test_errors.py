"""Misuse and bad input: torch's error classes, words that help, nothing changed."""

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

    def __init__(self, scaler_class: Any = amp_fx.GradScaler) -> None:
        self.scaler = scaler_class("cpu", init_scale=8.0)
        self.params = make_params((3,))
        self.optimizer = torch.optim.SGD(self.params, lr=0.1)
        set_scaled_grads(self.scaler, self.params, None)


def unscale_twice(case: Case) -> None:
    case.scaler.unscale_(case.optimizer)
    case.scaler.unscale_(case.optimizer)


def unscale_after_step(case: Case) -> None:
    case.scaler.step(case.optimizer)
    case.scaler.unscale_(case.optimizer)


def step_twice(case: Case) -> None:
    case.scaler.step(case.optimizer)
    case.scaler.step(case.optimizer)


def update_with_nothing_recorded(case: Case) -> None:
    case.scaler.update()


def update_twice(case: Case) -> None:
    case.scaler.step(case.optimizer)
    case.scaler.update()
    case.scaler.update()


def step_without_scale(case: Case) -> None:
    type(case.scaler)("cpu").step(case.optimizer)


def unscale_without_scale(case: Case) -> None:
    type(case.scaler)("cpu").unscale_(case.optimizer)


def update_without_scale(case: Case) -> None:
    type(case.scaler)("cpu").update()


def closure_by_keyword(case: Case) -> None:
    case.scaler.step(case.optimizer, closure=lambda: 0.0)


def scale_of_a_number(case: Case) -> None:
    case.scaler.scale(3.0)


def load_nothing(case: Case) -> None:
    case.scaler.load_state_dict({})


def load_without_scale(case: Case) -> None:
    case.scaler.load_state_dict({"growth_factor": 2.0})


def small_growth_factor(case: Case) -> None:
    type(case.scaler)("cpu", growth_factor=1.0)


def large_backoff_factor(case: Case) -> None:
    type(case.scaler)("cpu", backoff_factor=1.0)


def update_with_two_elements(case: Case) -> None:
    case.scaler.update(torch.ones(2))


def update_with_a_differentiable_tensor(case: Case) -> None:
    case.scaler.update(torch.tensor(2.0, requires_grad=True))


MISUSES = [
    unscale_twice,
    unscale_after_step,
    step_twice,
    update_with_nothing_recorded,
    update_twice,
    step_without_scale,
    unscale_without_scale,
    update_without_scale,
    closure_by_keyword,
    scale_of_a_number,
    load_nothing,
    load_without_scale,
    small_growth_factor,
    large_backoff_factor,
    update_with_two_elements,
    update_with_a_differentiable_tensor,
]


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__)
def test_code_that_catches_torchs_error_catches_ours(misuse: Any) -> None:
    with pytest.raises((AssertionError, RuntimeError, ValueError, KeyError)) as theirs:
        misuse(Case(torch.amp.GradScaler))
    with pytest.raises(theirs.type) as ours:
        misuse(Case())
    assert isinstance(ours.value, errors.AmpFxError)
    assert len(str(ours.value)) > 20


def test_a_positional_closure_does_not_slip_through() -> None:
    case = Case()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        case.scaler.step(case.optimizer, lambda: 0.0)
    case.scaler.step(case.optimizer, None)  # as Accelerate calls it


NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"init_scale": 0.0}, "above 0"),
    ({"init_scale": -1.0}, "above 0"),
    ({"init_scale": math.inf}, "finite"),
    ({"init_scale": math.nan}, "finite"),
    ({"init_scale": 1e300}, "finite"),
    ({"init_scale": 1e-46}, "float32 can hold and invert"),  # 0.0 there
    ({"init_scale": "8"}, "finite"),
    ({"growth_factor": 0.5}, "above 1"),
    ({"growth_factor": math.inf}, "above 1"),
    ({"growth_factor": math.nan}, "above 1"),
    ({"backoff_factor": 0.0}, "between 0 and 1"),
    ({"backoff_factor": -0.5}, "between 0 and 1"),
    ({"backoff_factor": math.nan}, "between 0 and 1"),
    ({"growth_interval": 0}, "at least 1"),
    ({"growth_interval": 1.5}, "at least 1"),
    ({"growth_interval": True}, "at least 1"),
    ({"min_scale": 0.0}, "above 0"),
    ({"history_size": -1}, "at least 0"),
]


@pytest.mark.parametrize(("settings", "expected"), NUMBERS, ids=lambda value: str(value)[:40])
def test_constructor(settings: dict[str, Any], expected: str) -> None:
    (name,) = settings
    with pytest.raises((ValueError, TypeError), match=rf"{name}.*{expected}"):
        amp_fx.GradScaler("cpu", **settings)


@pytest.mark.parametrize("device", ["gpu", None, ""])
def test_device(device: Any) -> None:
    with pytest.raises(ValueError, match="device"):
        amp_fx.GradScaler(device)


@pytest.mark.parametrize(
    ("setter", "value"),
    [
        ("set_growth_factor", 1.0),
        ("set_backoff_factor", 1.5),
        ("set_growth_interval", 0),
        ("update", 0.0),
        ("update", -2.0),
        ("update", math.inf),
        ("update", math.nan),
        ("update", 1e-40),
        ("update", "8"),
        ("update", True),
        ("update", torch.tensor(math.nan)),
        ("update", torch.tensor([0.0])),
        ("update", torch.ones(2)),
        ("update", torch.ones((), device="meta")),
        ("load_state_dict", []),
    ],
    ids=str,
)
def test_bad_values_change_nothing(setter: str, value: Any) -> None:
    case = Case()
    case.scaler.unscale_(case.optimizer)
    before = case.scaler.state_dict()
    with pytest.raises((ValueError, TypeError)):
        getattr(case.scaler, setter)(value)
    assert case.scaler.state_dict() == before
    case.scaler.step(case.optimizer)
    case.scaler.update()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"scale": None}, r"missing here: \['scale'\]"),
        ({"_growth_tracker": None}, r"missing here: \['_growth_tracker'\]"),
        ({"extra": 1}, r"not known: \['extra'\]"),
        ({"scale": 0.0}, "scale must be a finite number above 0"),
        ({"scale": "8"}, "scale must be a finite number above 0"),
        ({"growth_factor": 1.0}, "growth_factor must be"),
        ({"backoff_factor": 2.0}, "backoff_factor must"),
        ({"growth_interval": 2.5}, "growth_interval must be an integer"),
        ({"_growth_tracker": -1}, "_growth_tracker must be an integer"),
    ],
    ids=str,
)
def test_state_dicts_load_whole_or_not_at_all(change: dict[str, Any], expected: str) -> None:
    scaler = Case().scaler
    before = scaler.state_dict()
    state = {
        "scale": 2.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 1,
        **change,
    }
    state = {key: value for key, value in state.items() if value is not None}
    with pytest.raises(errors.ScalerStateDictError, match=expected):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("thing", [None, torch.nn.Linear(2, 2), [1], torch.optim.SGD, object()])
@pytest.mark.parametrize("method", ["unscale_", "step", "unscale_and_clip_", "compile_step"])
def test_what_is_no_optimizer(method: str, thing: Any) -> None:
    case = Case()
    args = (1.0,) if method == "unscale_and_clip_" else ()
    with pytest.raises(TypeError, match="expected an optimizer, with param_groups"):
        getattr(case.scaler, method)(thing, *args)
    case.scaler.step(case.optimizer)
    case.scaler.update()


def test_outputs_on_meta_leave_no_scale_there() -> None:
    scaler = amp_fx.GradScaler("cpu")
    with pytest.raises(ValueError, match="got one on 'meta'"):
        scaler.scale([torch.ones((), device="meta")])
    assert scaler.scale(torch.ones(())).item() == scaler.get_scale()


@pytest.mark.parametrize(("max_norm", "norm_type"), [(-1.0, 2.0), (math.nan, 2.0), (1.0, math.nan)])
def test_bad_norms_leave_gradients_scaled(max_norm: float, norm_type: float) -> None:
    case = Case()
    assert case.params[0].grad is not None
    before = case.params[0].grad.clone()
    with pytest.raises(ValueError, match="norm"):
        case.scaler.unscale_and_clip_(case.optimizer, max_norm, norm_type)
    assert torch.equal(case.params[0].grad, before)


@pytest.mark.parametrize("names", [["weight"], [("weight", 3)], [(1, torch.ones(2))], 5])
def test_names(names: Any) -> None:
    with pytest.raises(errors.ScalerTypeError, match="pairs of name and parameter"):
        amp_fx.GradScaler("cpu", named_parameters=names)
    with pytest.raises(errors.ScalerTypeError):
        amp_fx.GradScaler("cpu").name_parameters(names)


def test_schedulers() -> None:
    case = Case()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(case.optimizer, 0.5)
    with pytest.raises(errors.ScalerStateError, match="has not stepped the scheduler's optimizer"):
        case.scaler.step_scheduler(scheduler)
    with pytest.raises(TypeError, match="expected a learning-rate scheduler"):
        case.scaler.step_scheduler(None)


def test_lbfgs_cannot_be_compiled() -> None:
    scaler = Case().scaler
    with pytest.raises(TypeError, match="LBFGS cannot be compiled: its step needs a closure"):
        scaler.compile_step(torch.optim.LBFGS(make_params((3,))))
