"""The update of the loss scale, as one pure function."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from amp_fx.torch_private.kernels import amp_update_scale_


class ScaleState(NamedTuple):
    """Loss scale and the counters that its update needs; all 0-dim, on one device."""

    scale: Tensor  # float32
    growth_tracker: Tensor  # int32: updates without overflow since the scale changed
    num_overflows: Tensor  # int32: updates with an overflow in a row, with hysteresis only


def updated(
    state: ScaleState,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
) -> ScaleState:
    """Returns the state after an update.

    The scale backs off after an overflow and grows after ``growth_interval`` updates without one.
    Only the ``hysteresis``-th overflow in a row and those that follow it back off (NVIDIA Apex,
    ``update_scale_hysteresis``). An overflow does not move the scale below ``min_scale``, and
    growth does not move it above ``max_scale``; a scale that is outside already stays there.

    Args:
        state: The state in use, which does not change.
        found_inf: 0-dim, float32, on the state's device; not 0 if a gradient was not finite.
        growth_factor: The factor by which the scale grows.
        backoff_factor: The factor by which it backs off.
        growth_interval: The number of updates in a row without overflow before it grows.
        min_scale: The lower limit.
        max_scale: The upper limit; may be infinite.
        hysteresis: The number of overflows in a row before it backs off; at least 1.
    """
    old = state.scale
    scale, growth_tracker = old.clone(), state.growth_tracker.clone()
    amp_update_scale_(
        scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval
    )
    num_overflows = state.num_overflows
    lowest = old.clamp(max=min_scale)
    if hysteresis > 1:
        num_overflows = torch.where(found_inf != 0, num_overflows + 1, 0)
        lowest = torch.where(num_overflows < hysteresis, old, lowest)
    scale = scale.maximum(lowest)
    if max_scale < math.inf:
        scale = scale.minimum(old.clamp(min=max_scale))
    return ScaleState(scale, growth_tracker, num_overflows)
