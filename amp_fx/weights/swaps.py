"""Calls hooks around ``torch.utils.swap_tensors``.

``swap_tensors`` rejects tensors that have weak references, and the store refers to weights weakly.
``Module.to`` and ``load_state_dict`` swap parameters after
``torch.__future__.set_swap_module_params_on_conversion(True)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_fx.torch_private.patches import wrap_swaps

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Hook = Callable[[torch.Tensor], Callable[[], None] | None]

_hooks: list[Hook] = []


def before_swaps(hook: Hook) -> None:
    """Registers a hook that runs before two tensors are swapped, unless it is registered.

    Args:
        hook: Called with each of the two tensors. May return a function to call after the swap.
    """
    if not _hooks:
        wrap_swaps(_call_hooks)
    if hook not in _hooks:
        _hooks.append(hook)


def _call_hooks(tensor: torch.Tensor) -> Callable[[], None]:
    callbacks = [hook(tensor) for hook in _hooks]

    def call() -> None:
        for callback in filter(None, callbacks):
            callback()

    return call
