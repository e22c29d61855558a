"""Kernels and hooks of torch's optimizers, and the compilation of their steps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.torch_private.kernels import amp_foreach_non_finite_check_and_unscale_, foreach_copy_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def is_fused(optimizer: Any) -> bool:
    """Returns True if ``GradScaler.step`` lets the optimizer's kernels skip the step.

    Relies on ``GradScaler.step`` reading ``_step_supports_amp_scaling`` of the optimizer.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_step_observed(optimizer: Any) -> bool:
    """Returns True if a hook or a wrapper of ``step`` is called at each step of an optimizer.

    Accelerate replaces ``step`` of the instance during a step, to see whether the scaler calls it.
    ``LRScheduler`` also replaces it, only to warn about the order of calls; it does not count.
    """
    attributes = vars(optimizer)
    step = attributes.get("step")
    is_replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    return is_replaced or any(attributes.get(name) for name in _STEP_HOOKS)


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def states_with_momentum(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Lists the states of SGD's parameters that have a momentum buffer.

    Relies on fused SGD storing buffers in its first step that are not initialized if the step is
    skipped.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    states = optimizer.state.values()
    return [state for state in states if state.get("momentum_buffer") is not None]


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copies the code object of a function, and returns the function.

    Dynamo caches compiled code per code object, with a limited number of variants
    (``recompile_limit``). Functions that are created for each optimizer would otherwise share one.
    """
    function.__code__ = function.__code__.replace()
    return function
