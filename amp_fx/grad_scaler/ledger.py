"""What the scaler remembers of past steps and updates, and what it makes of that."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from amp_fx.grad_scaler import host_scale
from amp_fx.grad_scaler.reports import PendingRecord, StepReport, UpdateRecord, describe

if TYPE_CHECKING:
    from torch import Tensor

# The scale has collapsed when it is below 1 and this many backoffs below where it was at its
# highest: a model that merely starts with too large a scale settles long before.
_BACKOFFS_TO_COLLAPSE = 16
# Where a floor keeps it from that, it has collapsed after more overflows than this in a row.
_OVERFLOWS_TO_COLLAPSE = 16
# A float16 loss has a float16 gradient, which is the scale: beyond this it is infinite. Below, this
# many overflows before the first good step are still the loss's.
_FLOAT16_MAX = torch.finfo(torch.float16).max
_OVERFLOWS_OF_LOSS = 3


class Ledger:
    """The last step of each optimizer, the last updates, and whether the scale has collapsed."""

    def __init__(self, scale: float, size: int) -> None:
        """Remember up to `size` updates of a scale that starts here."""
        self.last_step: StepReport | None = None
        self._updates: deque[PendingRecord] = deque(maxlen=size)
        self._last_reports: tuple[StepReport, ...] = ()
        self._has_warned = False
        self._is_loss_float16: bool | None = False  # None once that has been told, or is no matter
        self.set_scale(scale)

    def set_scale(self, scale: float) -> None:
        """An iteration starts with a scale that was loaded or configured."""
        self._scale: float | Tensor = scale
        self.forget_peak(scale)

    def forget_peak(self, scale: float | None) -> None:
        """The user chose a scale, None if on the device: what went before tells of no collapse."""
        self._highest = 0.0 if scale is None else scale
        self._num_overflows = 0  # in a row, as far as the host knows

    def begin_iteration(self) -> None:
        """Gradients are about to change: let go of those that past reports could still read."""
        for report in self._last_reports:
            report.close()
        self._last_reports = ()

    def note_loss(self, output: Tensor) -> None:
        """An output is scaled."""
        if self._is_loss_float16 is False and output.dtype is torch.float16:
            self._is_loss_float16 = output.requires_grad

    def find_low_loss(self) -> str | None:
        """A warning, once, if the first steps overflowed because of a loss in float16."""
        if not self._is_loss_float16:
            return None
        if not (self._used > _FLOAT16_MAX or self._num_overflows >= _OVERFLOWS_OF_LOSS):
            return None
        self._is_loss_float16 = None
        return (
            "every step so far was skipped because gradients overflowed, and the loss itself is "
            f"float16, so that its gradient, the scale, is too: at {self._used:g} it overflows or "
            "comes near. Take the loss in float32: inside of the autocast region, or of outputs "
            "that are float32 (`.float()`, or output_dtype='original' for amp_fx.compile)."
        )

    def end_iteration(self, scale: Tensor, reports: tuple[StepReport, ...]) -> None:
        """The scale was updated; kept as a copy where only the device knows it."""
        self._used = self._scale if isinstance(self._scale, float) else 0.0
        known = host_scale.peek(scale)
        new_scale: float | Tensor = scale.clone() if known is None else known
        self._updates.append(PendingRecord(self._scale, new_scale, reports))
        self._scale = new_scale
        self._last_reports = reports
        was_skipped = any_skipped(reports)
        self._num_overflows = self._num_overflows + 1 if was_skipped else 0
        if was_skipped is not True:
            self._is_loss_float16 = None
        if known is not None and known > self._highest:
            self._highest = known

    def history(self) -> list[UpdateRecord]:
        """The last updates, oldest first; may wait for the device."""
        return [record.resolve() for record in self._updates]

    def find_collapse(
        self, scale: float | None, backoff_factor: float, floor: float, *, is_told_once: bool
    ) -> str | None:
        """A warning if the scale that was last seen tells of a collapse, or sticks at its floor."""
        if scale is None or (is_told_once and self._has_warned):
            return None
        self._highest = max(self._highest, scale)
        lowest = self._highest * backoff_factor**_BACKOFFS_TO_COLLAPSE
        is_far_down = scale < 1.0 and scale <= lowest
        is_stuck = scale <= floor and self._num_overflows > _OVERFLOWS_TO_COLLAPSE
        if not (is_far_down or is_stuck):
            return None
        self._has_warned = True
        overflows = next((r.overflows for r in reversed(self._last_reports) if r.skipped), ())
        return (
            f"the gradient scale has collapsed to {scale:g}: gradients overflow however small it "
            f"gets, so the cause lies elsewhere. Overflowed last: {describe(overflows)}. Look for "
            "a loss that is not finite, or for values above 65504 in the forward pass."
        )


def any_skipped(reports: tuple[StepReport, ...]) -> bool | None:
    """Whether a step was skipped; None where only the device knows."""
    outcomes = [report.known_skipped for report in reports]
    if any(outcomes):
        return True
    return None if None in outcomes or not outcomes else False
