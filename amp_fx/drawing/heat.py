"""Color levels in pictures of ``amp_fx.accuracy`` reports.

Levels depend on values, not on ranks: a program without a bad op has no red box.
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
"""Thresholds of the levels by measure; headroom is in bits below the limit."""

WORDS = {
    "effect": (
        "moves the loss by less than 0.001 %",
        "0.001 %",
        "0.01 %",
        "0.1 %",
        "1 %",
        "10 % or more",
    ),
    "error": ("relative error below 0.0001", "0.0001", "0.001", "0.01", "0.1", "1 or more"),
    "headroom": (
        "over 20 bits below the dtype's limit",
        "16 to 20",
        "12 to 16",
        "8 to 12",
        "4 to 8",
        "under 4 bits",
    ),
}
"""Descriptions of the levels, from 0 to 5."""


def levels_of(report: AccuracyReport, measure: str) -> dict[str, int]:
    """Returns the color level of each op, from 0 to 5, by name.

    Ops that only propagate infinities or NaNs have level 0, and so do ops in the backward of a loss
    that is not finite.

    Args:
        report: The report.
        measure: ``"effect"``: relative change of the loss by the op's error; without a loss, the
            op's share of the error of the outputs. ``"error"``: the accumulated relative error.
            ``"headroom"``: distance of the largest value to the limit of the dtype.
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
    """Returns the factor from effects to relative changes of the loss, or of the outputs' error."""
    if report.loss is not None:
        magnitude = abs(report.loss_magnitude or 0.0)
        return 1 / magnitude if magnitude and math.isfinite(magnitude) else 0.0
    effects = [n.effect_rms for n in report.nodes if math.isfinite(n.effect_rms)]
    total = math.hypot(*effects)
    is_known = total > 0 and math.isfinite(report.output_error)
    return report.output_error / total if is_known else 0.0
