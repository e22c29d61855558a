"""Dispatch modes and function modes, and the stacks on which torch keeps them."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

__all__ = ("TorchDispatchMode",)

DisableTorchFunction = torch._C.DisableTorchFunction
current_dispatch_mode = _get_current_dispatch_mode
no_dispatch_modes = _disable_current_modes


def function_modes() -> list[Any]:
    """Returns the active ``TorchFunctionMode`` objects of this thread, the innermost last."""
    stack: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return stack
