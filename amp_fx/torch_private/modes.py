"""Dispatch modes and function modes, and their stacks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("TorchDispatchMode",)

DisableTorchFunction = torch._C.DisableTorchFunction
current_dispatch_mode = _get_current_dispatch_mode
no_dispatch_modes = _disable_current_modes


@contextlib.contextmanager
def no_function_modes() -> Iterator[None]:
    """Context in which no ``TorchFunctionMode`` of this thread is active."""
    modes = [_pop_mode() for _ in function_modes()]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)  # type: ignore[no-untyped-call]


def function_modes() -> list[Any]:
    """Returns the active ``TorchFunctionMode`` objects of this thread, innermost last."""
    stack: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return stack
