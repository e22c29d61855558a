"""``amp_fx.accuracy`` in two low dtypes, with a verdict on moving from one to the other."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from amp_fx.numerics.records import number
from amp_fx.numerics.report import render
from amp_fx.reports import Report

if TYPE_CHECKING:
    from rich.console import RenderableType

    from amp_fx.numerics.records import Suspect
    from amp_fx.numerics.report import AccuracyReport


@dataclasses.dataclass(frozen=True, repr=False)
class DtypeChoice(Report):
    """The reports of one step in two low dtypes.

    Attributes:
        before: The report in the first dtype.
        after: The report in the second dtype.
    """

    computed, omitted = ("verdict", "is_safe", "reports"), ("before", "after")

    before: AccuracyReport
    after: AccuracyReport

    @property
    def reports(self) -> tuple[AccuracyReport, AccuracyReport]:
        """Both reports."""
        return self.before, self.after

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """The suspects in the second dtype."""
        return self.after.suspects

    @property
    def is_safe(self) -> bool:
        """True if the second dtype has no suspects, and a finite loss."""
        loss = self.after.loss
        is_finite = loss is None or math.isfinite(loss)
        return self._has_reference and is_finite and not self.suspects

    @property
    def _has_reference(self) -> bool:
        """True if the reference is finite; weights and inputs may not be."""
        loss = self.after.reference_loss
        is_finite = loss is None or math.isfinite(loss)
        return is_finite and self.after.reference_problem is None

    @property
    def verdict(self) -> str:
        """A sentence on moving from the first dtype to the second one."""
        first, second = self.before.dtype, self.after.dtype
        move = f"from {first} to {second}"
        if not self._has_reference:
            return (
                f"Nothing is known of moving {move}: {self.after.reference} itself is not finite."
            )
        errors = (
            f"the error is {number(_error(self.after))} ({first}: {number(_error(self.before))})"
        )
        if self.suspects:
            count = len(self.suspects)
            others = f", and {count - 1} more" if count > 1 else ""
            return f"Do not move {move} before a repair of {self.suspects[0]}{others}; {errors}."
        if not self.is_safe:
            return f"Do not move {move}: the loss is {self.after.loss}."
        why = f"{second} has no suspects"
        if self.before.suspects:
            why += (
                f" where {first} has {len(self.before.suspects)}, first {self.before.suspects[0]}"
            )
        return f"Moving {move} is safe for these inputs: {why}; {errors}.{self._scaling()}"

    def _scaling(self) -> str:
        """Returns a sentence on the scale of the loss."""
        has_gradients = self.after.gradients and not self.after.is_probed
        if not has_gradients or self.after.dtype != "float16":
            return " A gradient scaler is not needed." if has_gradients else ""
        if self.after.suggested_scale is None:
            return ""
        low, high = self.after.suggested_scale
        return f" Scale the loss by {low:g} to {high:g}."

    def _render(self) -> RenderableType:
        tables = (render(report) for report in self.reports)
        return Group(Text(self.verdict), *(part for table in tables for part in ("", table)))


def _error(report: AccuracyReport) -> float:
    """Returns the relative error of the loss or of the outputs; infinite for an infinite loss."""
    if report.loss is not None and not math.isfinite(report.loss):
        return math.inf
    return report.output_error
