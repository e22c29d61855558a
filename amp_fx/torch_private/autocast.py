"""Autocast's state, and the functions with which graphs change it."""

from __future__ import annotations

import torch
from torch.amp.autocast_mode import _cast, _enter_autocast, _exit_autocast

enter_autocast = _enter_autocast
exit_autocast = _exit_autocast
cast_tensors = _cast
DisableAutocast = torch._C._DisableAutocast


def is_any_autocast_enabled() -> bool:
    """Returns True if autocast is enabled in this thread for any device type except MPS."""
    return torch._C._is_any_autocast_enabled()


def privateuse1_name() -> str:
    """Returns the name of the device type ``privateuseone``, which programs can change."""
    return torch._C._get_privateuse1_backend_name()
