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
    assert isinstance(raised.value, errors.ScalerAssertionError)


RANGES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "init_scale": ("init_scale must be between", (0.0, -1.0, math.inf, math.nan, 1e-46, "8")),
    "min_scale": ("min_scale must be between", (0.0,)),
    "max_scale": ("max_scale must be between", (0.0, math.nan)),
    "growth_factor": ("growth factor must be > 1.0, and finite; got", (math.nan, math.inf, "2")),
    "backoff_factor": ("backoff factor must be < 1.0, and > 0.0; got", (math.nan, 0.0, -0.5)),
    "growth_interval": ("growth_interval must be an integer of at least 1", (0, -3, 2.5, True)),
    "hysteresis": ("hysteresis must be an integer of at least 1", (0, 1.5, True)),
}
"""Messages about settings, and values that are out of range; 1e-46 is 0.0 in float32."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        *(({name: value}, text) for name, (text, wrong) in RANGES.items() for value in wrong),
        ({"init_scale": 1e-46}, "the range of float32"),
        ({"max_scale": 1.0, "min_scale": 2.0}, r"max_scale must be at least min_scale, 2\.0; got"),
        ({"min_scale": 1e9}, r"init_scale must be between min_scale, 1000000000\.0, and max_scale"),
        ({"max_scale": 1.0}, r"and max_scale, 1\.0; got 65536\.0"),
    ],
    ids=str,
)
def test_constructor(settings: dict[str, Any], expected: str) -> None:
    is_factor = "factor must be" in expected  # torch asserts that
    error = errors.ScalerAssertionError if is_factor else errors.OptionError
    with pytest.raises(error, match=expected):
        amp_fx.GradScaler("cpu", **settings)


@pytest.mark.parametrize(
    ("name", "value"), [("growth_factor", 1.0), ("backoff_factor", 1.5), ("growth_interval", 0)]
)
def test_setters_and_state_dicts_check_the_same_ranges(name: str, value: float) -> None:
    scaler = Case().scaler
    before = scaler.state_dict()
    expected = name.replace("_factor", " factor")
    error = errors.OptionError if name == "growth_interval" else errors.ScalerAssertionError
    with pytest.raises(error, match=f"{expected} must be"):
        getattr(scaler, f"set_{name}")(value)
    with pytest.raises(error, match=f"{expected} must be"):
        scaler.load_state_dict({**before, name: value})
    with pytest.raises(errors.OptionError, match="scale must be between"):
        scaler.load_state_dict({**before, "scale": 0.0})
    assert scaler.state_dict() == before


class InterruptedStepError(Exception):
    """Ends an iteration."""


class Training:
    """Two equal runs of SGD, with a scaler and without."""

    def __init__(self, *, set_to_none: bool = True, fused: bool = False) -> None:
        self.scaler = amp_fx.GradScaler("cpu", init_scale=8.0)
        self.set_to_none = set_to_none
        self.weight, self.expected = (torch.ones(3, requires_grad=True) for _ in range(2))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1, fused=fused)
        self.inputs = torch.arange(3.0)

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        torch.autograd.backward(self.scaler.scale((self.weight * self.inputs).sum()))

    def finish(self) -> None:
        """Steps; the weight is then that of a step with unscaled gradients."""
        expected = (self.weight - 0.1 * self.inputs).detach()
        self.scaler.step(self.optimizer)
        torch.testing.assert_close(self.weight.detach(), expected)
        self.scaler.update()


@pytest.mark.parametrize("before", ["unscale_", "step", "unscale_ and step"])
@pytest.mark.parametrize("second", ["unscale_", "step"])
def test_a_scaler_recovers_from_an_iteration_without_update(before: str, second: str) -> None:
    training = Training()
    training.backward()
    for call in before.split(" and "):
        getattr(training.scaler, call)(training.optimizer)
    training.backward()
    if (before, second) == ("unscale_", "step"):  # the new gradients are unscaled
        training.finish()
    else:
        with pytest.raises(RuntimeError, match=r"Call update\(\) once in every iteration"):
            getattr(training.scaler, second)(training.optimizer)
    for _ in range(2):
        training.backward()
        training.scaler.unscale_(training.optimizer)
        training.finish()


def test_gradients_that_were_unscaled_once_are_not_unscaled_again() -> None:
    training = Training()
    training.backward()
    training.scaler.unscale_(training.optimizer)
    with pytest.raises(RuntimeError, match=r"has already been called .* update\(\) once"):
        training.scaler.unscale_(training.optimizer)
    training.finish()


def test_an_overflow_before_an_exception_shrinks_the_scale() -> None:
    training = Training()
    training.backward()
    assert training.weight.grad is not None
    training.weight.grad.fill_(math.inf)
    training.scaler.unscale_(training.optimizer)
    training.backward()
    training.finish()
    assert training.scaler.get_scale() == 4.0


def interrupted(training: Training) -> Training:
    """Returns a training whose step raised."""

    def interrupt(*_: Any) -> None:
        raise InterruptedStepError

    training.backward()
    with training.optimizer.register_step_pre_hook(interrupt), pytest.raises(InterruptedStepError):
        training.scaler.step(training.optimizer)
    return training


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_step_that_raises_leaves_no_scaled_gradients_for_the_next(
    set_to_none: bool, fused: bool
) -> None:
    training = interrupted(Training(set_to_none=set_to_none, fused=fused))
    training.backward()
    training.finish()


def test_scaled_gradients_are_not_added_to_those_of_a_step_that_raised() -> None:
    training = interrupted(Training())
    scaled = training.scaler.scale((training.weight * training.inputs).sum())
    torch.autograd.backward(scaled)
    with pytest.raises(RuntimeError, match="clear the gradients"):
        training.scaler.step(training.optimizer)
    training.backward()
    training.finish()


@pytest.mark.parametrize(
    "value",
    [0.0, -2.0, math.inf, math.nan, 1e-40, "8", True, torch.tensor(math.nan), torch.ones(2)],
    ids=str,
)
def test_bad_scales_change_nothing(value: Any) -> None:
    case = Case()
    case.scaler.unscale_(case.optimizer)
    before = case.scaler.state_dict()
    with pytest.raises(errors.OptionError, match="new_scale must be"):
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
    with pytest.raises(errors.OptionError, match=f"missing .*'{entry}'"):
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


@pytest.mark.parametrize("names", ["weight", ["weight"], [("weight", 3)], [(1, torch.ones(2))]])
def test_names(names: Any) -> None:
    with pytest.raises(errors.ArgumentTypeError, match="pairs of name and parameter"):
        amp_fx.GradScaler("cpu", named_parameters=names)
    with pytest.raises(errors.ArgumentTypeError):
        amp_fx.GradScaler("cpu").name_parameters(names)
