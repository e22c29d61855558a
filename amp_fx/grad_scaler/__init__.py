"""Gradient scaling for float16 training.

* ``scaler``: ``GradScaler``.
* ``scale_update``: the update of the scale as a pure function.
* ``scale_bound``: a lower bound of the scale that needs no synchronization with the device.
* ``gradients``: unscaling, checking and clipping of gradients.
* ``reports``: skipped steps, and the parameters that caused them.
* ``arguments``: argument checks.
"""

from __future__ import annotations

from amp_fx.grad_scaler.reports import Overflow, StepReport
from amp_fx.grad_scaler.scaler import GradScaler

__all__ = ["GradScaler", "Overflow", "StepReport"]
