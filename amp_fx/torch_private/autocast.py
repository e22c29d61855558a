"""Autocast's state, and the functions by which graphs change it."""

from __future__ import annotations

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

enter_autocast = _enter_autocast
exit_autocast = _exit_autocast
DisableAutocast = torch._C._DisableAutocast


def is_any_autocast_enabled() -> bool:
    """Returns True if autocast is on for any device type in this thread."""
    return torch._C._is_any_autocast_enabled()


def privateuse1_name() -> str:
    """Returns the name that a program gave to the device type ``privateuseone``."""
    return torch._C._get_privateuse1_backend_name()


def register_device_module(device_type: str, module: object) -> None:
    """Makes ``torch.<device_type>`` a module."""
    torch._register_device_module(device_type, module)  # type: ignore[no-untyped-call]
