"""Gradient scaling for float16 training, and compiled optimizer steps.

* ``scaler``: ``GradScaler``, a subclass of torch's, and its compiled steps.
* ``scale_update``: the scale's update, a pure function; ``scale_bound``: what the host knows of the
  scale without waiting.
* ``gradients``: an optimizer's gradients, grouped, unscaled, checked and clipped.
* ``reports``: which steps were skipped, and because of which parameters.
* ``compiled_step``: compiled steps without a scaler; ``two_pass``: the two passes over memory that
  they take.
* ``arguments``: checks of arguments; ``old_pickles``: pickles of earlier versions.
* ``torch_private``: the functions of torch that are not public, one wrapper each.
"""

from __future__ import annotations

import sys

from amp_fx.grad_scaler import old_pickles
from amp_fx.grad_scaler.compiled_step import PlainStep, compile_step
from amp_fx.grad_scaler.reports import Overflow, StepReport
from amp_fx.grad_scaler.scaler import CompiledStep, GradScaler

__all__ = ["CompiledStep", "GradScaler", "Overflow", "PlainStep", "StepReport", "compile_step"]

for _name in ("agreement", "limits", "loss_scale", "processes"):  # in older pickles
    sys.modules[f"amp_fx.grad_scaler.{_name}"] = old_pickles
