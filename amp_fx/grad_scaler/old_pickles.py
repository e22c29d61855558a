"""Classes that pickles of earlier versions refer to. ``GradScaler.__setstate__`` reads them."""

from __future__ import annotations

import math
from typing import Any


class Limits:
    """Range and hysteresis of a scale."""


class Agreement:
    """Processes that skipped steps together. Its pickles are empty."""


def upgrade(state: dict[str, Any]) -> dict[str, Any]:
    """Converts the state of a pickled scaler to the attributes of this version."""
    if state.get("_limits") is None:
        return state
    # In the oldest pickles, these names have underscores, and the limits contain the count.
    limits = {name.lstrip("_"): value for name, value in vars(state["_limits"]).items()}
    return {
        **state,
        "_min_scale": limits["min_scale"],
        "_max_scale": limits["max_scale"] or math.inf,
        "_hysteresis": limits["hysteresis"],
        "_init_num_overflows": state.get("_num_overflows", limits.get("num_overflows")),
        "_num_overflows": None,
        "_limits": None,
        "_agreement": None,
    }
