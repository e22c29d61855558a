"""Gradient scaling for float16 training, and compiled optimizer steps.

* ``scaler``: ``GradScaler`` and its compiled steps.
* ``scale_update``: the update of the scale as a pure function.
* ``scale_bound``: a lower bound of the scale that needs no synchronization with the device.
* ``gradients``: unscaling, checking and clipping of gradients.
* ``reports``: skipped steps, and the parameters that caused them.
* ``compiled_step``: compiled steps without a scaler; ``two_pass``: their two passes over memory.
* ``arguments``: argument checks.
"""

from __future__ import annotations

from amp_fx.grad_scaler.compiled_step import PlainStep, compile_step
from amp_fx.grad_scaler.reports import Overflow, StepReport
from amp_fx.grad_scaler.scaler import CompiledStep, GradScaler

__all__ = ["CompiledStep", "GradScaler", "Overflow", "PlainStep", "StepReport", "compile_step"]
