"""The scale's update as a pure function, and the limits that the scaler keeps with it."""

from __future__ import annotations

import math
import pickle
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import amp_fx
from amp_fx.grad_scaler.scale_update import ScaleState, updated
from tests.grad_scaler.loops import OPTIMIZERS, make_params, set_scaled_grads

EVERYTHING_OPEN: dict[str, Any] = {
    "growth_factor": 2.0,
    "backoff_factor": 0.25,
    "growth_interval": 2,
    "min_scale": 1.0,
    "max_scale": 64.0,
    "hysteresis": 1,
}


def state_of(scale: float, tracker: int, row: int) -> ScaleState:
    counts = (torch.tensor(count, dtype=torch.int32) for count in (tracker, row))
    return ScaleState(torch.tensor(scale), *counts)


@pytest.mark.parametrize(
    ("now", "overflows", "hysteresis", "expected"),
    [
        ((8.0, 0, 0), 0, 1, (8.0, 1, 0)),
        ((8.0, 1, 0), 0, 1, (16.0, 0, 0)),
        ((8.0, 1, 0), 1, 1, (2.0, 0, 0)),
        ((8.0, 1, 0), 2, 1, (2.0, 0, 0)),  # of two optimizers
        ((48.0, 1, 0), 0, 1, (64.0, 0, 0)),
        ((2.0, 1, 0), 1, 1, (1.0, 0, 0)),
        ((0.5, 1, 0), 1, 1, (0.5, 0, 0)),  # a scale that was set outside of the limits stays
        ((128.0, 1, 0), 0, 1, (128.0, 0, 0)),
        ((0.5, 1, 0), 0, 1, (1.0, 0, 0)),
        ((128.0, 1, 0), 1, 1, (32.0, 0, 0)),
        ((8.0, 1, 0), 1, 2, (8.0, 0, 1)),
        ((8.0, 0, 1), 1, 2, (2.0, 0, 2)),
        ((8.0, 0, 2), 1, 2, (2.0, 0, 3)),
        ((8.0, 1, 2), 0, 2, (16.0, 0, 0)),
        ((48.0, 1, 0), 0, 2, (64.0, 0, 0)),
    ],
)
def test_updated(
    now: tuple[float, int, int], overflows: int, hysteresis: int, expected: tuple[float, int, int]
) -> None:
    state, found_inf = state_of(*now), torch.tensor(float(overflows))
    settings = {**EVERYTHING_OPEN, "hysteresis": hysteresis}
    for _ in range(2):  # it changes nothing and remembers nothing
        new = updated(state, found_inf, **settings)
        assert tuple(t.item() for t in new) == expected
        assert [t.dtype for t in new] == [torch.float32, torch.int32, torch.int32]
    assert tuple(t.item() for t in state) == now
    assert found_inf.item() == overflows


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(
    scale=st.floats(2.0**-126, 2.0**127, width=32),
    growth_factor=st.sampled_from([1.001, 1.5, 2.0, 1e30]),
    backoff_factor=st.sampled_from([0.3, 0.5, 0.999]),
    overflows=st.booleans(),
    tracker=st.integers(0, 1),
)
def test_without_limits_it_is_torchs_kernel(
    scale: float, growth_factor: float, backoff_factor: float, overflows: bool, tracker: int
) -> None:
    state, found_inf = state_of(scale, tracker, 0), torch.tensor(float(overflows))
    new = updated(
        state,
        found_inf,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=2,
        min_scale=2.0**-149,
        max_scale=math.inf,
        hysteresis=1,
    )
    torch._amp_update_scale_(
        state.scale, state.growth_tracker, found_inf, growth_factor, backoff_factor, 2
    )
    assert [*new[:2]] == [*state[:2]]


class Run:
    """A scaler and its optimizer."""

    def __init__(self, optimizer: str = "sgd-momentum", **settings: Any) -> None:
        self.scaler = amp_fx.GradScaler("cpu", **settings)
        self.params = make_params((3,))
        self.optimizer = OPTIMIZERS[optimizer](self.params)

    def iterate(self, *overflows: bool) -> float:
        """Returns the scale afterwards."""
        for overflowed in overflows:
            set_scaled_grads(self.scaler, self.params, math.inf if overflowed else None)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return self.scaler.get_scale()


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(
    hysteresis=st.integers(1, 4), overflows=st.lists(st.booleans(), min_size=1, max_size=20)
)
def test_hysteresis(hysteresis: int, overflows: list[bool]) -> None:
    """Counts by hand, as NVIDIA Apex does: an early overflow only restarts growth."""
    run = Run(init_scale=2.0**40, growth_interval=2, hysteresis=hysteresis)
    scale, num_in_a_row, num_finite = 2.0**40, 0, 0
    before = run.params[0].detach().clone()
    for number, overflowed in enumerate(overflows):
        num_in_a_row = num_in_a_row + 1 if overflowed else 0
        num_finite = 0 if overflowed else num_finite + 1
        if overflowed and num_in_a_row >= hysteresis:
            scale /= 2
        if num_finite == 2:
            scale, num_finite = 2 * scale, 0
        assert run.iterate(overflowed) == scale
        assert torch.equal(before, run.params[0]) == overflowed  # skipped all the same
        before = run.params[0].detach().clone()
        if number == 3:
            run.scaler = pickle.loads(pickle.dumps(run.scaler))


@pytest.mark.parametrize("how", ["number", "tensor", "load"])
def test_a_new_scale_starts_counting_anew(how: str) -> None:
    run = Run(init_scale=8.0, hysteresis=2)
    run.iterate(True)
    if how == "load":
        run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 32.0})
    else:
        run.scaler.update(32.0 if how == "number" else torch.tensor(32.0))
    assert run.iterate(True) == 32.0
    assert run.iterate(True) == 16.0


def test_limits_are_pickled() -> None:
    run = Run(init_scale=8.0, growth_interval=1, min_scale=4.0, max_scale=16.0)
    run.scaler = pickle.loads(pickle.dumps(run.scaler))
    assert run.iterate(True, True, True) == 4.0
    assert run.iterate(False, False, False) == 16.0


def test_the_scale_stays_at_its_address() -> None:
    """Keeps the address of the scale, which CUDA graphs read."""
    run = Run(growth_interval=1)
    run.iterate(False)
    scale = run.scaler._scale
    assert run.iterate(True, False) == 2.0**17
    assert run.scaler._scale is scale


@pytest.mark.parametrize("optimizer", ["sgd-momentum", "sgd-fused"])
@pytest.mark.parametrize("settings", [{}, {"min_scale": 2.0**-20}], ids=str)
def test_two_hundred_overflows_leave_a_scale_that_works(
    optimizer: str, settings: dict[str, Any]
) -> None:
    run = Run(optimizer, **settings)
    scale = run.iterate(*[True] * 200)
    assert scale == settings.get("min_scale", 2.0**-64)
    set_scaled_grads(run.scaler, run.params, None)
    assert run.params[0].grad is not None
    expected = run.params[0].grad / scale
    run.scaler.unscale_(run.optimizer)
    torch.testing.assert_close(run.params[0].grad, expected)
    run.scaler.step(run.optimizer)
    assert run.scaler.last_step is not None
    assert not run.scaler.last_step.skipped
    assert run.params[0].isfinite().all()
