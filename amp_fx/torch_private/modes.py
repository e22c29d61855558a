"""Dispatch modes and function modes, and their stacks."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ("TorchDispatchMode",)

DisableTorchFunction = torch._C.DisableTorchFunction
no_dispatch_modes = _disable_current_modes


def function_modes() -> list[Any]:
    """Returns the active ``TorchFunctionMode`` objects of this thread, innermost last."""
    stack: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return stack
