"""A step that undoes itself on the device when gradients overflowed, so that no host waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_fx.grad_scaler.agreement import local, params_of
from amp_fx.grad_scaler.torch_private import runs_only_own_code
from amp_fx.grad_scaler.unscale import on_devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def has_state(optimizer: Any) -> bool:
    """Whether each parameter with a gradient has state: the step that makes it cannot be undone."""
    return all(optimizer.state.get(param) for param in params_with_grads(optimizer))


def written_tensors(optimizer: Any, params: list[Tensor]) -> list[Tensor]:
    """All tensors that a step writes: the parameters, and what the optimizer keeps of them.

    Args:
        optimizer: keeps tensors in its `state`, nested at will, and in its `param_groups`. Learning
            rates are not among them: no step writes one.
        params: those with gradients.
    """
    state = getattr(optimizer, "state", {})
    in_groups = [
        {key: value for key, value in group.items() if key not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
    return [*params, *_tensors([state.get(param) for param in params]), *_tensors(in_groups)]


def params_with_grads(optimizer: Any) -> list[Tensor]:
    """The parameters that have gradients."""
    return [param for param in params_of(optimizer) if param.grad is not None]


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a structure of dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


@torch.no_grad()
def step_unless(found_inf: Tensor, optimizer: Any, step: Callable[..., Any]) -> Any:
    """Step an optimizer that has its state; on overflow put all tensors back as they were.

    Costs a copy of the tensors for the time of the step. Torch's own optimizers, where no hook
    looks on, step a part of their parameters at a time, so that the copy is of that part: those of
    them that are capturable treat each parameter by itself.

    Args:
        found_inf: 0-dim; not 0 where gradients overflowed.
        optimizer: what to step.
        step: the optimizer's, with the caller's arguments.

    Returns:
        What the optimizer's step returns; None where no parameter has a gradient.
    """
    overflowed = on_devices(found_inf != 0)
    if not runs_only_own_code(optimizer):
        return _step_or_put_back(overflowed, optimizer, step)
    groups, result = optimizer.param_groups, None
    try:
        for group, part in _parts(groups):
            optimizer.param_groups = [{**group, "params": part}]
            result = _step_or_put_back(overflowed, optimizer, step)
    finally:
        optimizer.param_groups = groups
    return result


MOST_ELEMENTS = 2**24
"""Of the parameters of one part; a larger parameter is a part by itself."""


def _parts(groups: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """The parameters with gradients in parts, each with its group."""
    for group in groups:
        part: list[Tensor] = []
        num_elements = 0
        for param in group["params"]:
            if param.grad is None:
                continue
            if part and num_elements + param.numel() > MOST_ELEMENTS:
                yield group, part
                part, num_elements = [], 0
            part.append(param)
            num_elements += param.numel()
        if part:
            yield group, part


def _step_or_put_back(
    overflowed: Mapping[torch.device, Tensor], optimizer: Any, step: Callable[..., Any]
) -> Any:
    params = params_with_grads(optimizer)
    old = [local(tensor).clone() for tensor in written_tensors(optimizer, params)]
    with torch.enable_grad():
        result = step()
    # Looked up again: a step may put new tensors in the place of old ones.
    for tensor, value in zip(map(local, written_tensors(optimizer, params)), old, strict=True):
        tensor.copy_(torch.where(overflowed[tensor.device], value, tensor))
    return result
