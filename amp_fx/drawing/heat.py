"""Strengths of the colours in a picture of ``amp_fx.accuracy``.

They follow values, not ranks: a program without a bad op has no red box.
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.numerics.records import OpRecord
    from amp_fx.numerics.report import AccuracyReport

STEPS = {
    "effect": (1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
    "error": (1e-4, 1e-3, 1e-2, 1e-1, 1.0),
    "headroom": (-20.0, -16.0, -12.0, -8.0, -4.0),
}
"""By measure, the values at which a colour gets stronger; headroom counts bits below the limit."""

WORDS = {
    "effect": (
        *("moves the loss by less than 0.001 %", "0.001 %", "0.01 %", "0.1 %", "1 %"),
        "10 % or more",
    ),
    "error": ("relative error below 0.0001", "0.0001", "0.001", "0.01", "0.1", "1 or more"),
    "headroom": (
        *("over 20 bits below the dtype's limit", "16 to 20", "12 to 16", "8 to 12", "4 to 8"),
        "under 4 bits",
    ),
}
"""Meanings of the strengths, from the weakest."""


def levels_of(report: AccuracyReport, measure: str) -> dict[str, int]:
    """Returns how strongly each op is coloured, from 0 to 5, by name.

    An op that only passes on what became infinite or NaN before it has no colour, nor has the
    backward of a loss that is not finite.

    Args:
        report: The report.
        measure: ``"effect"``: the part of the loss that the op's own error moves it by; without a
            loss, its share in the error of the outputs. ``"error"``: the relative error since the
            start. ``"headroom"``: how near the largest value comes to the dtype's limit.
    """
    scale = _effect_scale(report)
    value: Callable[[OpRecord], float] = {
        "effect": lambda node: node.effect_rms * scale,
        "error": lambda node: node.accumulated,
        "headroom": lambda node: -node.headroom,
    }[measure]
    steps = STEPS[measure]
    has_gradients = report.loss is None or math.isfinite(report.loss)

    def level(node: OpRecord) -> int:
        if node.stage == "backward" and not has_gradients:
            return 0
        if node.is_overflow:
            return len(steps)
        return bisect.bisect(steps, value(node)) if math.isfinite(value(node)) else 0

    return {node.name: level(node) for node in report.nodes}


def _effect_scale(report: AccuracyReport) -> float:
    """Returns what turns effects into parts of the loss, or of the outputs' error."""
    if report.loss is not None:
        magnitude = abs(report.loss_magnitude or 0.0)
        return 1 / magnitude if magnitude and math.isfinite(magnitude) else 0.0
    effects = [n.effect_rms for n in report.nodes if math.isfinite(n.effect_rms)]
    together = math.hypot(*effects)
    is_known = together > 0 and math.isfinite(report.output_error)
    return report.output_error / together if is_known else 0.0
