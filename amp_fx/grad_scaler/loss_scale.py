"""The loss scale: how an update changes it, how far it may move, what the host knows of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from amp_fx.devices.host_copy import HostCopy
from amp_fx.errors import ScalerValueError
from amp_fx.grad_scaler import arguments
from amp_fx.grad_scaler.torch_private import update_scale_

# The smallest scale that float32 can invert without loss.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Above this no decision depends on the scale, so a read that is under way is soon enough.
_LOOK_BELOW = 1024.0
# The host multiplies in float64, the device in float32: the two may differ by this factor.
_ROUNDING = 1 + 2.0**-20


def peek(value: Tensor) -> float | None:
    """Returns the value of a 0-dim tensor if reading it waits for nothing, as on the CPU."""
    return value.item() if value.is_cpu else None


def wait_for(value: Tensor) -> float:
    """Returns the value of a 0-dim tensor; waits for the device to get there."""
    return float(value.item())


class LossScale(NamedTuple):
    """Holds the scale and what its updates count."""

    scale: Tensor  # float32, 0-dim
    growth_tracker: Tensor  # int32, 0-dim: updates without overflow since the scale changed
    num_overflows: int | Tensor  # in a row; 0 if the hysteresis is 1


@dataclass(frozen=True)
class Limits:
    """Holds the range of the scale, and how many overflows in a row it takes to back off.

    A scale that the user sets may lie outside of `min_scale` and `max_scale`; floor or ceiling,
    which the scale keeps to, are then there.
    """

    min_scale: float
    max_scale: float | None
    hysteresis: int
    floor: float
    ceiling: float | Tensor | None

    def around(self, scale: float | Tensor) -> Limits:
        """Returns these limits, moved to where they allow a scale that the user set."""
        known = peek(scale) if isinstance(scale, Tensor) else scale
        floor = min(self.min_scale, _SMALLEST_SCALE if known is None else known)
        if self.max_scale is None:
            return dataclasses.replace(self, floor=floor)
        lowest = self.max_scale
        ceiling = scale.clamp(min=lowest) if isinstance(scale, Tensor) else max(lowest, scale)
        return dataclasses.replace(self, floor=floor, ceiling=ceiling)

    def __getstate__(self) -> dict[str, Any]:
        """Gives a ceiling that is on a device as a number."""
        ceiling = self.ceiling.item() if isinstance(self.ceiling, Tensor) else self.ceiling
        return {**self.__dict__, "ceiling": ceiling}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the names that attributes had in older pickles, too: with an underscore."""
        self.__dict__.update({name.lstrip("_"): value for name, value in state.items()})


def checked_limits(min_scale: float, max_scale: float | None, hysteresis: int) -> Limits:
    """Makes limits of the settings of `GradScaler`, which are checked."""
    floor = arguments.positive_float(min_scale, "min_scale")
    ceiling = None
    if max_scale is not None and max_scale != math.inf:
        ceiling = arguments.positive_float(max_scale, "max_scale")
    hysteresis = arguments.whole(hysteresis, "hysteresis", minimum=1)
    if ceiling is not None and ceiling < floor:
        raise ScalerValueError(
            f"max_scale must be at least min_scale, {floor!r}; got {max_scale!r}."
        )
    return Limits(floor, ceiling, hysteresis, floor, ceiling)


def adjust(
    now: LossScale,
    found_inf: Tensor,
    factors: tuple[float, float, int],
    limits: Limits,
    *,
    may_reach_floor: bool,
) -> LossScale:
    """Returns the scale after an update; depends on its arguments alone.

    The scale backs off after an overflow, and grows after `growth_interval` updates in a row
    without one. As in NVIDIA Apex (`update_scale_hysteresis`), the `hysteresis`-th overflow in a
    row and all that follow it back off; earlier ones only start growth anew.

    The tensors of `now` are donated: the result lies in their memory. A CUDA graph that the user
    captured reads the scale where it is, and a copy of it would be another kernel.

    Args:
        now: the scale in use.
        found_inf: 0-dim, on the scale's device; not 0 if a gradient was not finite.
        factors: for growth and backoff, and the growth interval.
        limits: within which it moves.
        may_reach_floor: whether it may shrink below the floor; if not, no kernel looks.
    """
    scale, growth_tracker, num_overflows = now
    old = is_early = None
    if limits.hysteresis > 1:
        is_overflow = found_inf != 0
        num_overflows = (num_overflows + is_overflow.int()) * is_overflow
        is_early = is_overflow & (num_overflows < limits.hysteresis)
        old = scale.clone()
    update_scale_(scale, growth_tracker, found_inf, *factors)
    if old is not None and is_early is not None:
        scale.copy_(torch.where(is_early, old, scale))
    if limits.ceiling is not None:
        scale.clamp_(max=limits.ceiling)
    if may_reach_floor:
        scale.clamp_(min=limits.floor)
    return LossScale(scale, growth_tracker, num_overflows)


def module_with_queues(value: Tensor) -> Any:
    """Returns the module of a tensor's device if that copies to the host unwaited for, else None.

    MPS has no copy that is known not to wait: there the bound is not raised again, and steps go on
    checking gradients once more, unscaled.
    """
    return torch.get_device_module(value.device) if value.device.type in ("cuda", "xpu") else None


def _is_capturing(module: Any) -> bool:
    """Returns whether kernels are recorded in a graph now; not every torch has graphs for XPU."""
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


class HostScale:
    """Knows a lower bound of the scale, and its value when last seen.

    On the CPU both are exact. On a device the bound assumes that each update of unknown outcome
    backed off, until a copy that was started without waiting has arrived.

    Attributes:
        lower_bound: the scale is at least this.
        seen: the newest value that was read, or None.
    """

    def __init__(self, value: float | None) -> None:
        """Starts from a scale that was just set; None if only the device knows it."""
        self.lower_bound = 0.0 if value is None else value
        self.seen = value
        self._copy = HostCopy()
        self._shrunk = 1.0  # how far the scale may have shrunk since a copy was started

    def expect_update(self, backoff: float, floor: float, *, skipped: bool | None) -> bool:
        """Lowers the bound for an update to come; returns whether that may go below the floor.

        `skipped` says whether a step was skipped; None if only the device knows.
        """
        found = self._copy.take()
        if found is not None:
            (self.seen,) = found.tolist()
            self.lower_bound = max(self.lower_bound, cast("float", self.seen) * self._shrunk)
        if skipped is False:
            return self.lower_bound < floor
        self.lower_bound *= backoff
        self._shrunk *= backoff
        return self.lower_bound < floor * _ROUNDING

    def follow_update(self, scale: Tensor, floor: float) -> None:
        """Looks at a scale that was updated, without waiting; it is not below its floor."""
        value = peek(scale)
        if value is not None:
            self.lower_bound = self.seen = value
            return
        self.lower_bound = max(self.lower_bound, floor)
        if not self._copy.is_under_way and self.lower_bound < _LOOK_BELOW:
            module = module_with_queues(scale)
            if module is not None and not _is_capturing(module):
                self._copy.start(scale)
                self._shrunk = 1.0
