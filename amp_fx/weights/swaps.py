"""Calls hooks around ``torch.utils.swap_tensors``.

``swap_tensors`` rejects tensors that have weak references, and the store refers to weights weakly.
``Module.to`` and ``load_state_dict`` swap parameters after
``torch.__future__.set_swap_module_params_on_conversion(True)``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Hook = Callable[[torch.Tensor], Callable[[], None] | None]

_hooks: list[Hook] = []


def before_swaps(hook: Hook) -> None:
    """Registers a hook that runs before two tensors are swapped.

    The first call replaces ``torch.utils.swap_tensors``. Code that has already imported the
    function still calls the original.

    Args:
        hook: Called with each of the two tensors. May return a function to call after the swap.
    """
    if not _hooks:
        torch.utils.swap_tensors = _with_hooks(torch.utils.swap_tensors)
    _hooks.append(hook)


def _with_hooks(
    swap: Callable[[torch.Tensor, torch.Tensor], None],
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        callbacks = [hook(tensor) for hook in _hooks for tensor in (t1, t2)]
        try:
            swap(t1, t2)
        finally:
            for callback in filter(None, callbacks):
                callback()

    return swap_tensors
