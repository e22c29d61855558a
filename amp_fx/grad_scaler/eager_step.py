"""Steps that run an optimizer's own code, eagerly: fused, undone on the device, or after a wait."""

from __future__ import annotations

import inspect
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_fx.grad_scaler import loss_scale
from amp_fx.grad_scaler.gradients import OnDevices, params_with_grads
from amp_fx.grad_scaler.processes import local
from amp_fx.grad_scaler.torch_private import runs_only_own_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from amp_fx.grad_scaler.reports import OptimizerState
    from amp_fx.grad_scaler.scaler import GradScaler

MOST_ELEMENTS = 2**24
"""Of the parameters that are stepped, and copied, at a time; a larger one is stepped alone."""

_STEPS_SEEN: weakref.WeakKeyDictionary[Callable[..., Any], bool] = weakref.WeakKeyDictionary()


def step_fused(
    scaler: GradScaler, optimizer: Any, state: OptimizerState, step: Callable[..., Any]
) -> Any:
    """Steps an optimizer that takes `grad_scale` and `found_inf` (torch's contract for it).

    `step` is the optimizer's own, with the caller's arguments.
    """
    if _takes_scaler(optimizer.step):
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the passed "
            "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
            "`found_inf: Tensor` to the passed optimizer and let the optimizer use them "
            "directly.",
            FutureWarning,
            stacklevel=3,
        )
        return step(grad_scaler=scaler)
    scale, _ = scaler._check_scale_growth_tracker("step")
    if state.stage is OptState.UNSCALED:
        optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
    else:
        scaler._check_inf_per_device(optimizer)
        optimizer.grad_scale = scale * getattr(optimizer, "grad_scale", 1)
    assert state.flag is not None
    # With a flag, Adam and Adagrad take it off each of their step counters, which costs as much as
    # the check. Torch's own code needs none that the host knows to be 0.
    is_needless = loss_scale.peek(state.flag) == 0.0 and runs_only_own_code(optimizer)
    optimizer.found_inf = None if is_needless else state.flag
    try:
        return step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _takes_scaler(step: Callable[..., Any]) -> bool:
    """Returns whether a step has a `grad_scaler` argument; remembers, as looking takes 50 us."""
    function = getattr(step, "__func__", step)
    known = _STEPS_SEEN.get(function)
    if known is None:
        known = _STEPS_SEEN[function] = "grad_scaler" in inspect.signature(step).parameters
    return known


def step_checked(
    scaler: GradScaler, optimizer: Any, state: OptimizerState, step: Callable[..., Any]
) -> Any:
    """Steps an optimizer whose gradients are unscaled and checked, if they are finite."""
    report = state.report or state.make_report(scaler._names)
    if report.known_skipped is None and _can_be_undone(optimizer):
        assert state.flag is not None
        return step_unless(state.flag, optimizer, step)
    if not report.skipped:
        return step()
    report.look()
    return None


def _can_be_undone(optimizer: Any) -> bool:
    """Returns whether a step is on the device, and makes no state that is not there."""
    is_capturable = all(group.get("capturable", False) for group in optimizer.param_groups)
    return is_capturable and all(map(optimizer.state.get, params_with_grads(optimizer)))


def written_tensors(optimizer: Any, params: list[Tensor]) -> list[Tensor]:
    """Lists all tensors that a step writes: parameters with gradients, and what is kept of them.

    An optimizer keeps tensors in its `state`, nested at will, and in its `param_groups`. Learning
    rates are not among them: no step writes one.
    """
    state = getattr(optimizer, "state", {})
    in_groups = [
        {key: value for key, value in group.items() if key not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
    return [*params, *_tensors([state.get(param) for param in params]), *_tensors(in_groups)]


def _tensors(value: Any) -> list[Tensor]:
    """Lists the tensors in a structure of dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


@torch.no_grad()
def step_unless(found_inf: Tensor, optimizer: Any, step: Callable[..., Any]) -> Any:
    """Steps an optimizer that has its state; on overflow puts all tensors back as they were.

    Costs a copy of the tensors for the time of the step. Torch's own optimizers, if they have
    no hooks, step a part of their parameters at a time, so that the copy is of that part: those of
    them that are capturable treat each parameter by itself.
    """
    overflowed = OnDevices(found_inf != 0)
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


def _parts(groups: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """Yields the parameters with gradients in parts, each with its group."""
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
