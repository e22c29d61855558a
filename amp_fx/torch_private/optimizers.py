"""Kernels and hooks of torch's optimizers, and the compilation of their steps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.optim.optimizer as optimizer_module

from amp_fx.torch_private.kernels import amp_foreach_non_finite_check_and_unscale_, foreach_copy_

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torch import Tensor


def unscale_and_check_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Sets ``found_inf`` to 1 if any gradient is not finite, then multiplies all by ``inv_scale``.

    Gradients must have the same device and dtype, and DTensors also the same mesh and placements.
    For DTensors, the flag is reduced over all ranks. The other arguments are 0-dim float32 tensors
    on the same device.
    """
    try:
        amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    except NotImplementedError:  # CUDA has no kernel for bfloat16
        copies = [grad.float() for grad in grads]
        amp_foreach_non_finite_check_and_unscale_(copies, found_inf, inv_scale)
        foreach_copy_(grads, copies)


_FUSED_ARGUMENTS = ("grad_scale", "found_inf")


@contextlib.contextmanager
def restored_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager around a step with a scaler, which may raise.

    Relies on ``GradScaler.step`` passing a fused step its arguments as ``grad_scale`` and
    ``found_inf`` of the optimizer, and deleting them only if the step succeeds.
    """
    attributes = vars(optimizer)
    given = {name: attributes[name] for name in _FUSED_ARGUMENTS if name in attributes}
    try:
        yield
    except BaseException:
        for name in _FUSED_ARGUMENTS:
            attributes.pop(name, None)
        attributes.update(given)
        raise


def states_with_momentum(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Lists the states of SGD's parameters that have a momentum buffer.

    Relies on fused SGD storing buffers in its first step that are not initialized if the step is
    skipped.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    states = optimizer.state.values()
    return [state for state in states if state.get("momentum_buffer") is not None]


def runs_only_own_code(optimizer: Any, allowed: Collection[Any] = ()) -> bool:
    """Returns True if an optimizer is one of torch's, without hooks or a replaced ``step``.

    The wrapper of ``step`` that learning-rate schedulers install is allowed.

    Args:
        optimizer: The optimizer.
        allowed: Global post-step hooks that are allowed.
    """
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return False
    step = vars(optimizer).get("step")
    wraps_original = getattr(step, "__wrapped__", None) is type(optimizer).step
    if step is not None and not (wraps_original and hasattr(step, "_wrapped_by_lr_sched")):
        return False
    return not (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or set(optimizer_module._global_optimizer_post_hooks.values()) - set(allowed)
    )


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Records that the optimizer was stepped, so that learning-rate schedulers do not warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def mark_static(tensors: list[Tensor]) -> None:
    """Marks the addresses of tensors as static, like those of a module's parameters.

    Inductor does not use CUDA graphs for functions that write other inputs. No guard is installed:
    if an address changes, as for gradients, the CUDA graph is recorded again.
    """
    from amp_fx.torch_private.dynamo import mark_static_address

    for tensor in tensors:
        mark_static_address(tensor, guard=False)


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copies the code object of a function, and returns the function.

    Dynamo caches compiled code per code object, with a limited number of variants
    (``recompile_limit``). Functions that are created for each optimizer would otherwise share one.
    """
    function.__code__ = function.__code__.replace()
    return function
