"""`adjust`: what an update makes of the scale, and of nothing else."""

from __future__ import annotations

import pytest
import torch

from amp_fx.grad_scaler.loss_scale import LossScale, adjust, checked_limits

FACTORS = (2.0, 0.25, 2)
"""For growth and backoff, and the growth interval."""


def update(
    scale: float, tracker: int, row: int, *, overflows: bool, hysteresis: int
) -> tuple[float, int, int]:
    limits = checked_limits(1.0, 64.0, hysteresis)
    now = LossScale(torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32), row)
    found_inf = torch.tensor(float(overflows))
    new = adjust(now, found_inf, FACTORS, limits, may_reach_floor=True)
    assert new.scale is now.scale  # where CUDA graphs read it
    assert found_inf.item() == float(overflows)
    return new.scale.item(), int(new.growth_tracker.item()), int(new.num_overflows)


@pytest.mark.parametrize(
    ("now", "overflows", "hysteresis", "expected"),
    [
        ((8.0, 0, 0), False, 1, (8.0, 1, 0)),
        ((8.0, 1, 0), False, 1, (16.0, 0, 0)),
        ((8.0, 1, 0), True, 1, (2.0, 0, 0)),
        ((48.0, 1, 0), False, 1, (64.0, 0, 0)),
        ((2.0, 1, 0), True, 1, (1.0, 0, 0)),
        ((8.0, 1, 0), True, 2, (8.0, 0, 1)),
        ((8.0, 0, 1), True, 2, (2.0, 0, 2)),
        ((8.0, 0, 2), True, 2, (2.0, 0, 3)),
        ((8.0, 1, 2), False, 2, (16.0, 0, 0)),
    ],
)
def test_adjust(
    now: tuple[float, int, int], overflows: bool, hysteresis: int, expected: tuple[float, int, int]
) -> None:
    assert update(*now, overflows=overflows, hysteresis=hysteresis) == expected
    assert (
        update(*now, overflows=overflows, hysteresis=hysteresis) == expected
    )  # it remembers nothing


@pytest.mark.parametrize("scale", [0.5, 128.0])
def test_limits_move_to_a_scale_that_was_set(scale: float) -> None:
    limits = checked_limits(1.0, 64.0, 1)
    moved = limits.around(scale)
    assert (moved.floor, moved.ceiling) == (min(1.0, scale), max(64.0, scale))
    assert (moved.min_scale, moved.max_scale) == (1.0, 64.0)
    assert moved.around(8.0) == limits
