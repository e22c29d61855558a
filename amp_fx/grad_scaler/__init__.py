"""Gradient scaling for float16 training.

In the order in which a training step meets them:

* ``scaler``: ``GradScaler``, from top to bottom; the rest serves it.
* ``arguments``: checks of what users pass in.
* ``loss_scale``: the scale's update, its limits, and what the host knows of it without waiting.
* ``gradients``: an optimizer's gradients: named, grouped, unscaled, checked and clipped.
* ``processes``: several processes skip steps together.
* ``eager_step``: steps that run the optimizer's own code.
* ``compiled_step``: unscale, check, clip and step as one compiled call.
* ``two_pass``: the same in two passes over memory, with a scaler or without, and what Adam, AdamW
  and SGD do to one weight.
* ``reports``: what happened to each optimizer since the last update, which steps were skipped, and
  because of which parameters.
* ``torch_private``: the functions of torch that are not public, one wrapper each.
"""

from __future__ import annotations

from amp_fx.grad_scaler.compiled_step import CompiledStep
from amp_fx.grad_scaler.reports import Overflow, StepReport, UpdateRecord
from amp_fx.grad_scaler.scaler import GradScaler
from amp_fx.grad_scaler.two_pass import PlainStep, compile_step

__all__ = [
    "CompiledStep",
    "GradScaler",
    "Overflow",
    "PlainStep",
    "StepReport",
    "UpdateRecord",
    "compile_step",
]
