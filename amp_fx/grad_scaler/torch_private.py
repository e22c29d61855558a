"""The private functions of torch that the scaler relies on, one wrapper each.

tests/grad_scaler/test_torch_private.py says what is relied on.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.optim.optimizer as optimizer_module

from amp_fx.weights.write_signals import after_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def check_and_unscale_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Sets `found_inf` to 1 if any gradient is not finite, then multiplies all by `inv_scale`.

    Takes dense gradients of one device and dtype; the others are float32, 0-dim, on that device.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)


def has_check_and_unscale(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether `check_and_unscale_` has a kernel for such gradients.

    CUDA has none for bfloat16, and no device has one for complex numbers.
    """
    return _try_check_and_unscale(device, dtype)


# As torch.compiler.assume_constant_result does it, which imports torch._dynamo: seconds. Dynamo
# ignores caches that it traces, and warns of them.
has_check_and_unscale._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _try_check_and_unscale(device: torch.device, dtype: torch.dtype) -> bool:
    flag = torch.zeros((), dtype=torch.float32, device=device)
    try:
        check_and_unscale_(
            [torch.zeros(1, dtype=dtype, device=device)], flag, torch.ones_like(flag)
        )
    except (NotImplementedError, RuntimeError):
        return False
    return True


def update_scale_(scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, *factors: Any) -> None:
    """Backs the scale off if `found_inf` is not 0; otherwise grows it every so many calls.

    The factors are that of growth, that of backoff, and the number of calls.
    """
    torch._amp_update_scale_(scale, growth_tracker, found_inf, *factors)


def group_by_device_and_dtype(
    tensors: list[Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Groups tensors in one C++ call: 0.1 us a tensor, against 1 us for a loop in Python."""
    if not tensors:
        return {}
    grouped = torch._C._group_tensors_by_device_and_dtype([tensors], False)  # type: ignore[list-item]
    return {key: lists[0] for key, (lists, _) in grouped.items()}  # type: ignore[misc]


def runs_only_own_code(optimizer: Any) -> bool:
    """Returns whether a step runs torch's own code only: one of its optimizers, with no hooks.

    The hook by which kept casts of weights learn of steps does not count: a compiled step need not
    run it, as its kernels ask for the pointers that they write through. Nor does the wrapper that
    learning-rate schedulers put around `step`; anything else in its place does.
    """
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return False
    step = vars(optimizer).get("step")
    is_around_own = getattr(step, "__wrapped__", None) is type(optimizer).step
    if step is not None and not (is_around_own and hasattr(step, "_wrapped_by_lr_sched")):
        return False
    return not (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or set(optimizer_module._global_optimizer_post_hooks.values()) - {after_step}
    )


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Returns the optimizer's step in a form that compiles into one graph.

    `Optimizer.step` is wrapped in a profiler hook and in a grad-mode switch with graph breaks.
    This takes both off where nothing else runs in a step; other optimizers keep what wraps it.
    """
    if not runs_only_own_code(optimizer):
        return optimizer.step
    return functools.partial(inspect.unwrap(type(optimizer).step), optimizer)


def mark_kept_in_place(tensors: list[Tensor]) -> None:
    """Tells the compiler that tensors stay where they are, as a module's parameters do.

    Inductor makes no CUDA graph of a call that writes other inputs. There is no guard on it: where
    an address does change, as those of gradients may, the CUDA graph is recorded again.
    """
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function a code object of its own.

    Dynamo keeps what it compiles by code object, a few variants of each at most
    (``recompile_limit``): functions that are defined anew for each optimizer would share one.
    """
    function.__code__ = function.__code__.replace()
    return function


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tells learning-rate schedulers, which warn otherwise, that the optimizer was stepped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
