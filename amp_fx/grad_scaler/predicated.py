"""A step that undoes itself on the device when gradients overflowed, so that no host waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_fx.grad_scaler.agreement import local
from amp_fx.grad_scaler.unscale import on_devices

if TYPE_CHECKING:
    from collections.abc import Callable


def stepped_tensors(optimizer: Any) -> list[Tensor] | None:
    """All tensors that a step writes: the parameters with gradients, and their state.

    Returns:
        None if some parameter has no state yet: the first step creates it, which cannot be undone.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not all(optimizer.state.get(param) for param in params):
        return None
    return [local(tensor) for tensor in params + state_tensors(optimizer, params)]


def state_tensors(optimizer: Any, params: list[Tensor]) -> list[Tensor]:
    """The tensors in the optimizer's state of these parameters."""
    return [
        value
        for param in params
        for value in optimizer.state.get(param, {}).values()
        if isinstance(value, Tensor)
    ]


@torch.no_grad()
def step_unless(found_inf: Tensor, tensors: list[Tensor], step: Callable[..., Any]) -> Any:
    """Step an optimizer; on overflow put all tensors back as they were.

    Costs a copy of `tensors` for the time of the step.

    Args:
        found_inf: 0-dim; not 0 where gradients overflowed.
        tensors: what the step writes.
        step: the optimizer's.

    Returns:
        What the optimizer's step returns.
    """
    overflowed = on_devices(found_inf != 0)
    old = [tensor.clone() for tensor in tensors]
    with torch.enable_grad():
        result = step()
    for tensor, value in zip(tensors, old, strict=True):
        tensor.copy_(torch.where(overflowed[tensor.device], value, tensor))
    return result
