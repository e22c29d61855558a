"""Floor, ceiling and hysteresis of the scale; what happens when it collapses all the same."""

from __future__ import annotations

import math
import pickle
import warnings
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import amp_fx
from amp_fx import errors
from amp_fx.grad_scaler import loss_scale
from tests.grad_scaler.loops import OPTIMIZERS, make_params, set_scaled_grads


class Run:
    """A scaler and its optimizer; warnings of a collapse are another test's."""

    def __init__(self, **settings: Any) -> None:
        self.scaler = amp_fx.GradScaler("cpu", **settings)
        self.params = make_params((3,))
        self.optimizer = torch.optim.SGD(self.params, lr=0.1)

    def iterate(self, *overflows: bool) -> float:
        """The scale afterwards."""
        for overflowed in overflows:
            set_scaled_grads(self.scaler, self.params, math.inf if overflowed else None)
            self.scaler.step(self.optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", errors.ScaleCollapseWarning)
                self.scaler.update()
        return self.scaler.get_scale()


def test_the_scale_stops_at_a_ceiling() -> None:
    run = Run(init_scale=8.0, growth_interval=1, max_scale=20.0)
    assert [run.iterate(False) for _ in range(3)] == [16.0, 20.0, 20.0]
    assert run.iterate(True) == 10.0
    assert run.iterate(False) == 20.0


@pytest.mark.parametrize("how", ["init", "number", "tensor", "load"])
def test_a_scale_above_the_ceiling_may_be_set(how: str) -> None:
    run = Run(init_scale=64.0 if how == "init" else 8.0, growth_interval=1, max_scale=16.0)
    run.scaler.scale(torch.ones(()))
    if how in ("number", "tensor"):
        run.scaler.update(64.0 if how == "number" else torch.tensor(64.0))
    elif how == "load":
        run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 64.0})
    assert run.iterate(False) == 64.0
    assert run.iterate(True, True, True, False, False, False, False) == 64.0
    run.scaler.update(4.0)
    assert run.iterate(False, False, False) == 16.0


def test_a_scale_that_only_the_device_knows_raises_the_ceiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(init_scale=8.0, growth_interval=1, max_scale=16.0)
    run.scaler.scale(torch.ones(()))
    monkeypatch.setattr(loss_scale, "peek", lambda _: None)
    run.scaler.update(torch.tensor(64.0))
    assert run.iterate(False) == 64.0


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(
    hysteresis=st.integers(1, 4), overflows=st.lists(st.booleans(), min_size=1, max_size=20)
)
def test_hysteresis(hysteresis: int, overflows: list[bool]) -> None:
    """Counted by hand, as NVIDIA Apex does: an early overflow only starts growth anew."""
    run = Run(init_scale=2.0**40, growth_interval=2, hysteresis=hysteresis)
    scale, num_in_a_row, num_finite = 2.0**40, 0, 0
    before = run.params[0].detach().clone()
    for overflowed in overflows:
        num_in_a_row = num_in_a_row + 1 if overflowed else 0
        num_finite = 0 if overflowed else num_finite + 1
        if overflowed and num_in_a_row >= hysteresis:
            scale /= 2
        if num_finite == 2:
            scale, num_finite = 2 * scale, 0
        assert run.iterate(overflowed) == scale
        assert torch.equal(before, run.params[0]) == overflowed  # skipped all the same
        before = run.params[0].detach().clone()


def test_hysteresis_and_ceiling_are_pickled() -> None:
    run = Run(init_scale=8.0, growth_interval=1, hysteresis=3, max_scale=16.0)
    run.iterate(True, True)
    run.scaler = pickle.loads(pickle.dumps(run.scaler))
    assert run.iterate(True) == 4.0
    assert run.iterate(False, False, False) == 16.0


def test_a_new_scale_starts_counting_anew() -> None:
    run = Run(init_scale=8.0, hysteresis=2)
    run.iterate(True)
    run.scaler.update(32.0)
    assert run.iterate(True) == 32.0
    assert run.iterate(True) == 16.0


@pytest.mark.parametrize("optimizer", ["sgd-momentum", "sgd-fused"])
def test_a_collapse_is_noticed_at_the_floor(optimizer: str) -> None:
    """Where every step is skipped and the scale has nowhere to go."""
    params = make_params((3,))
    stepped = OPTIMIZERS[optimizer](params)
    scaler = amp_fx.GradScaler("cpu", init_scale=512.0, min_scale=128.0, on_collapse="raise")

    def overflow(times: int) -> None:
        for _ in range(times):
            set_scaled_grads(scaler, params, math.nan)
            scaler.step(stepped)
            scaler.update()

    overflow(10)
    set_scaled_grads(scaler, params, None)  # a batch that was just bad
    scaler.step(stepped)
    scaler.update()
    overflow(10)
    with pytest.raises(errors.ScaleCollapseError, match="collapsed to 128"):
        overflow(20)
    assert scaler.get_scale() == 128.0


def test_a_collapse_raises_if_told_to() -> None:
    """Each time it gets worse. The update is made; a new scale ends it."""
    params = [("layer.bias", torch.nn.Parameter(torch.ones(3)))]
    run = Run(init_scale=1.0, on_collapse="raise", named_parameters=params)
    run.params[:] = [params[0][1]]
    run.optimizer = torch.optim.SGD(run.params, lr=0.1)
    run.iterate(*[True] * 15)
    for scale in (2.0**-16, 2.0**-17):
        with pytest.raises(errors.ScaleCollapseError, match=r"layer\.bias \(1 inf, 0 nan of 3\)"):
            run.iterate(True)
        assert run.scaler.get_scale() == scale
        assert run.iterate(False) == scale
    run.scaler.update(1.0)
    assert run.iterate(True) == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_scale": 0.0}, "max_scale must be a finite number above 0"),
        ({"max_scale": math.nan}, "max_scale must be a finite number above 0"),
        ({"max_scale": 1.0, "min_scale": 2.0}, "max_scale must be at least min_scale, 2.0; got"),
        ({"hysteresis": 0}, "hysteresis must be an integer of at least 1"),
        ({"hysteresis": 1.5}, "hysteresis must be an integer of at least 1"),
        ({"on_collapse": "ignore"}, "on_collapse must be one of warn, raise; got 'ignore'"),
        ({"on_collapse": None}, "on_collapse must be one of warn, raise; got None"),
    ],
    ids=str,
)
def test_bad_limits(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        amp_fx.GradScaler("cpu", **settings)
