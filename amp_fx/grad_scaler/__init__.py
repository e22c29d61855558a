"""Gradient scaling for float16 training.

In the order in which a training step meets them:

* ``scaler``: ``GradScaler``, the public interface; the rest serves it.
* ``bookkeeping``: its methods that touch no gradient: reports, settings, state.
* ``core``: the scale itself, and what all ways to step share.
* ``limits``: how far the scale may move.
* ``arguments``: checks of what users pass in.
* ``outputs``: scaling of outputs in any structure.
* ``states``: what has happened to each optimizer since the last update.
* ``gradients``: an optimizer's gradients, grouped for fused kernels.
* ``unscale``: unscaling, checking and clipping of such groups.
* ``agreement``: several processes skip steps together.
* ``stepping``: the two ways in which `step` steps an optimizer.
* ``predicated``: a step that undoes itself on the device when gradients overflowed.
* ``compiled_step``: unscale, check, clip and step as one call, compiled.
* ``two_pass``: the same in two passes over memory, which write the kept copies of weights, too.
* ``update_rules``: what Adam, AdamW and SGD do to one weight.
* ``plain_step``: such steps without a scaler.
* ``host_scale``: what the host knows of the scale without waiting for the device.
* ``ledger``, ``reports``, ``names``: which steps were skipped, and because of which parameters.
* ``torch_private``: the functions of torch that are not public, one wrapper each.
"""

from __future__ import annotations

from amp_fx.grad_scaler.compiled_step import CompiledStep
from amp_fx.grad_scaler.plain_step import PlainStep, compile_step
from amp_fx.grad_scaler.reports import Overflow, StepReport, UpdateRecord
from amp_fx.grad_scaler.scaler import GradScaler

__all__ = [
    "CompiledStep",
    "GradScaler",
    "Overflow",
    "PlainStep",
    "StepReport",
    "UpdateRecord",
    "compile_step",
]
