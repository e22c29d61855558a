"""Optimizers of torch: their kernels, their hooks, and how their steps are compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.optim.optimizer as optimizer_module

from amp_fx.torch_private.kernels import amp_foreach_non_finite_check_and_unscale_, foreach_copy_

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor


def unscale_and_check_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Sets ``found_inf`` to 1 if any gradient is not finite, then multiplies all by ``inv_scale``.

    Takes gradients of one device and dtype, and of one mesh and one list of placements if they are
    DTensors, where all ranks get the largest flag. The others are float32, 0-dim, on that device.
    """
    try:
        amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    except NotImplementedError:  # CUDA has no kernel for bfloat16
        copies = [grad.float() for grad in grads]
        amp_foreach_non_finite_check_and_unscale_(copies, found_inf, inv_scale)
        foreach_copy_(grads, copies)


def runs_only_own_code(optimizer: Any, allowed: Collection[Any] = ()) -> bool:
    """Returns True if a step runs torch's own code only: one of its optimizers, without hooks.

    The wrapper that learning-rate schedulers put around ``step`` does not count; any other
    replacement of ``step`` does.

    Args:
        optimizer: The optimizer.
        allowed: Global hooks after a step that do not count.
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
        or set(optimizer_module._global_optimizer_post_hooks.values()) - set(allowed)
    )


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tells learning-rate schedulers, which warn otherwise, that the optimizer was stepped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def mark_static(tensors: list[Tensor]) -> None:
    """Tells the compiler that tensors keep their addresses, as a module's parameters do.

    Inductor makes no CUDA graph of a call that writes other inputs. There is no guard on it: if an
    address does change, as those of gradients may, the CUDA graph is recorded again.
    """
    from amp_fx.torch_private.dynamo import mark_static_address

    for tensor in tensors:
        mark_static_address(tensor, guard=False)


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function a code object of its own.

    Dynamo caches compiled code by code object, a few variants of each at most
    (``recompile_limit``): functions that are defined anew for each optimizer would share one.
    """
    function.__code__ = function.__code__.replace()
    return function
