"""Dispatch modes and function modes, and their stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("TorchDispatchMode",)

DisableTorchFunction = torch._C.DisableTorchFunction
no_dispatch_modes = _disable_current_modes
function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
"""Returns the active ``TorchFunctionMode`` objects of this thread, innermost last."""
