"""The update of the loss scale as a pure function."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from amp_fx.torch_private.kernels import amp_update_scale_


class ScaleState(NamedTuple):
    """Loss scale and counters; all tensors are 0-dim, on one device."""

    scale: Tensor  # float32
    growth_tracker: Tensor  # int32: updates without overflow since the scale changed
    num_overflows: Tensor  # int32: consecutive updates with an overflow; only with hysteresis


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
    It backs off from the ``hysteresis``-th consecutive overflow on (NVIDIA Apex,
    ``update_scale_hysteresis``). Backoff stops at ``min_scale`` and growth at ``max_scale``; a
    scale outside of the limits is not moved inside.

    Args:
        state: The current state, which does not change.
        found_inf: 0-dim float32 tensor on the state's device; nonzero if a gradient was not finite.
        growth_factor: Factor by which the scale grows.
        backoff_factor: Factor by which the scale backs off.
        growth_interval: Number of consecutive updates without overflow before the scale grows.
        min_scale: The lower limit.
        max_scale: The upper limit; may be infinite.
        hysteresis: Number of consecutive overflows before the scale backs off; at least 1.
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
