"""Automatic mixed precision as a compiler pass for PyTorch."""

from __future__ import annotations

from amp_fx.cast_policy import CastPolicy
from amp_fx.grad_scaler import GradScaler
from amp_fx.policy import Policy

__all__ = ["CastPolicy", "GradScaler", "Policy"]
