"""Classes that pickles of earlier versions name; ``GradScaler.__setstate__`` reads them."""

from __future__ import annotations

import math
from typing import Any


class Limits:
    """Range and hysteresis of a scale: the attributes that the pickle has."""


class Agreement:
    """Processes that skipped steps together; its pickles are empty."""


def upgrade(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of a pickled scaler with the attributes that this version has."""
    if state.get("_limits") is None:
        return state
    # The oldest pickles have underscores here, and the count among the limits.
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
