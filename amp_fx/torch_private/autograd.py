"""State of autograd and of ``torch.func``."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch import predispatch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from amp_fx.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")

__all__ = ("temporarily_clear_interpreter_stack",)

enter_dual_level = predispatch._enter_dual_level
exit_dual_level = predispatch._exit_dual_level
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
DispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
current_autograd_node = torch._C._current_autograd_node
neg_view = torch._neg_view
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


def apply_in_op(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Applies a function of autograd in the kernel of a composite op.

    ``torch.func`` calls the kernel for one transform, with tensors of that transform: there the
    function is one of ordinary autograd.
    """
    if not are_transforms_active():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    with enable_single_level_autograd_function():
        return _of_one_level(function).apply(*args)


@functools.cache
def _of_one_level(function: type[torch.autograd.Function]) -> Any:
    methods = {k: each for k, each in vars(function).items() if isinstance(each, staticmethod)}
    return type(function.__name__, (_SingleLevelFunction,), methods)


are_transforms_active = torch._C._are_functorch_transforms_active


def below_transform(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function whose ops the running transform of ``torch.func`` does not see.

    Forward and ``jvp`` of a function of autograd run with gradients off. The transforms around this
    one have to record its ops.
    """
    if not are_transforms_active():
        return function(*args, **kwargs)
    with DispatchBelowAutograd(), torch.enable_grad(), _set_fwd_grad_enabled(True):
        return function(*args, **kwargs)


def observing_backwards(
    begins: Callable[[torch.Tensor], None],
) -> contextlib.AbstractContextManager[None]:
    """Context that calls a function with each tensor with which a backward of this thread begins.

    A backward is a call that accumulates gradients: ``Tensor.backward`` and
    ``torch.autograd.backward``, unless the backward of a node calls them.

    Relies on ``torch.autograd._engine_run_backward``, which both call.
    """
    run_engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    thread = threading.get_ident()

    def run(roots: Sequence[torch.Tensor], *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        is_outermost = threading.get_ident() == thread and current_autograd_node() is None
        for root in roots if accumulate_grad and is_outermost else ():
            begins(root)
        return run_engine(roots, *args, accumulate_grad=accumulate_grad, **kwargs)

    return replaced((torch.autograd, "_engine_run_backward", run))


def latest_sequence_number() -> int:
    """Returns the sequence number of the latest autograd node of this thread."""
    return torch._C._autograd._get_sequence_nr() - 1


@contextlib.contextmanager
def disable_saved_tensors_hooks() -> Iterator[None]:
    """Context in which hooks for saved tensors do not run."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


@contextlib.contextmanager
def restore_functorch_levels() -> Iterator[None]:
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
