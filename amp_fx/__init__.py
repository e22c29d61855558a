"""Automatic mixed precision as a compiler pass for PyTorch."""

from __future__ import annotations

from amp_fx import weight_cache
from amp_fx.autocast_region import autocast
from amp_fx.cast_policy import CastPolicy
from amp_fx.compiled import compile  # noqa: A004
from amp_fx.custom_function import custom_bwd, custom_fwd
from amp_fx.devices import register_device
from amp_fx.grad_scaler import GradScaler
from amp_fx.policy import Policy, preset
from amp_fx.registered_ops import register_op

__all__ = [
    "CastPolicy",
    "GradScaler",
    "Policy",
    "autocast",
    "compile",
    "custom_bwd",
    "custom_fwd",
    "preset",
    "register_device",
    "register_op",
    "weight_cache",
]
