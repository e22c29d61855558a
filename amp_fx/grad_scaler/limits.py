"""How far the scale may move: its floor, its ceiling, and how many overflows it sits out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from amp_fx.errors import ScalerValueError
from amp_fx.grad_scaler import arguments, host_scale
from amp_fx.grad_scaler.torch_private import update_scale_

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# The smallest scale that float32 can invert without loss.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Limits:
    """What keeps the scale from following the gradients everywhere.

    A scale that the user sets may lie outside; the limit then moves there.

    Attributes:
        floor: the scale does not shrink below this.
    """

    def __init__(self, min_scale: float, max_scale: float | None, hysteresis: int) -> None:
        """Take the settings of `GradScaler`.

        Raises:
            ScalerValueError: one has a value that is not allowed, or `max_scale` is too small.
            ScalerTypeError: one is of the wrong kind.
        """
        self._min_scale = arguments.positive_float(min_scale, "min_scale")
        self._max_scale = None
        if max_scale is not None and max_scale != math.inf:
            self._max_scale = arguments.positive_float(max_scale, "max_scale")
        self._hysteresis = arguments.whole(hysteresis, "hysteresis", minimum=1)
        if self._max_scale is not None and self._max_scale < self._min_scale:
            raise ScalerValueError(
                f"max_scale must be at least min_scale, {self._min_scale!r}; got {max_scale!r}."
            )
        self.floor = self._min_scale
        self._ceiling: float | Tensor | None = self._max_scale
        self._num_overflows: int | Tensor = 0  # in a row

    def follow(self, value: float | Tensor) -> None:
        """The scale was set to this. The overflows before it tell nothing of it."""
        known = host_scale.peek(value) if isinstance(value, torch.Tensor) else value
        self.floor = min(self._min_scale, _SMALLEST_SCALE if known is None else known)
        if self._max_scale is not None:
            at_least = self._max_scale
            self._ceiling = (
                value.clamp(min=at_least)
                if isinstance(value, torch.Tensor)
                else max(at_least, value)
            )
        self._num_overflows = 0

    def adjust_(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_inf: Tensor,
        factors: tuple[float, float, int],
    ) -> None:
        """Back the scale off or let it grow, on the device and up to the ceiling.

        Args:
            scale: float32, 0-dim; changed in place.
            growth_tracker: int32, 0-dim; changed in place.
            found_inf: 0-dim; not 0 if something was not finite.
            factors: growth factor, backoff factor and growth interval.
        """
        undo = self._sit_out(scale, found_inf) if self._hysteresis > 1 else None
        update_scale_(scale, growth_tracker, found_inf, *factors)
        if undo is not None:
            undo()
        if self._ceiling is not None:
            scale.clamp_(max=self._ceiling)

    def _sit_out(self, scale: Tensor, found_inf: Tensor) -> Callable[[], object]:
        """Count overflows in a row; gives a call that undoes a backoff that comes too early.

        As in NVIDIA Apex (`update_scale_hysteresis`), every overflow of a row from the
        `hysteresis`-th on backs off.
        """
        is_overflow = found_inf != 0
        self._num_overflows = (self._num_overflows + is_overflow.int()) * is_overflow
        is_early = is_overflow & (self._num_overflows < self._hysteresis)
        old = scale.clone()
        return lambda: scale.copy_(torch.where(is_early, old, scale))

    def __getstate__(self) -> dict[str, object]:
        """All of it, with what is on a device as numbers."""
        state = self.__dict__.copy()
        for key in ("_ceiling", "_num_overflows"):
            if isinstance(state[key], torch.Tensor):
                state[key] = state[key].item()
        return state
