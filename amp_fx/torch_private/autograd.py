"""State of autograd and of ``torch.func``."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch import predispatch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ("temporarily_clear_interpreter_stack",)

enter_dual_level = predispatch._enter_dual_level
exit_dual_level = predispatch._exit_dual_level
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
DispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
current_autograd_node = torch._C._current_autograd_node
neg_view = torch._neg_view
preserve_version_counters = torch.autograd.grad_mode._unsafe_preserve_version_counter
set_grad_enabled = torch._C._set_grad_enabled


def skip_frames_of(function: type[torch.autograd.Function], *helpers: Callable[..., Any]) -> None:
    """Makes Dynamo, if it is imported, skip the frames of an autograd function.

    If compiled code calls ``backward()``, Dynamo would compile the backward of the function. Its
    guards would unpack saved tensors again, which checkpoints allow only once.
    """
    if "torch._dynamo" in sys.modules:
        _skip_frames_of(function, helpers)


@functools.cache
def _skip_frames_of(
    function: type[torch.autograd.Function], helpers: tuple[Callable[..., Any], ...]
) -> None:
    from amp_fx.torch_private.dynamo import skip_frames

    methods = [value for value in vars(function).values() if isinstance(value, staticmethod)]
    skip_frames((*helpers, *(method.__func__ for method in methods)))


def latest_sequence_number() -> int:
    """Returns the sequence number of the latest autograd node of this thread."""
    return torch._C._autograd._get_sequence_nr() - 1


@contextlib.contextmanager
def saved_tensors_hooks_tracing() -> Iterator[None]:
    """Context in which hooks for saved tensors do not run."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


@contextlib.contextmanager
def functorch_levels_restored() -> Iterator[None]:
    """Context that pops levels of ``torch.func`` and re-enables saved tensor hooks on exit.

    An exception may have left levels on the stack and the hooks disabled.
    """
    stack, hooks = torch._C._functorch, torch._C._autograd
    depth = len(stack.get_interpreter_stack() or ())
    is_forbidden = hooks._saved_tensors_hooks_get_disabled_error_message() is not None
    try:
        yield
    finally:
        if not is_forbidden:
            hooks._saved_tensors_hooks_enable()
        while len(stack.get_interpreter_stack() or ()) > depth:
            stack.pop_dynamic_layer_stack()
