"""What a step of an optimizer moves: a copy of it takes one, on fake tensors."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from amp_fx.errors import UnsupportedError
from amp_fx.explanation.records import StepRecord
from amp_fx.explanation.running import fake_copy, leaf_tensors
from amp_fx.graphs.traffic import TrafficMode, num_bytes, num_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch._ops import OpOverload

    from amp_fx.explanation.records import CastRecord

LATER = 1000.0
"""What counts of steps are taken for: some optimizers do less in their first steps."""


def explain_step(
    optimizer: torch.optim.Optimizer,
    model: Callable[..., Any],
    casts: Iterable[CastRecord],
    *,
    device: str,
    is_imagined: bool,
) -> StepRecord:
    """Counts one step of an optimizer whose state exists, with a gradient for each parameter.

    Neither the optimizer nor anything that it refers to changes. Loss scaling and clipping are
    not part of it; what ``compile_step`` makes of all that is fused, and moves less.
    """
    with FakeTensorMode() as mode:
        try:
            own = _copy(optimizer, mode, "cpu" if is_imagined else None)
            for group in own.param_groups:
                _choose_kernels(group, device, is_imagined=is_imagined)
            counter = _StepTraffic()
            _step(own, _StepTraffic())  # which makes the state
            _step(own, counter)
        except Exception as error:
            raise UnsupportedError(
                f"a step of {type(optimizer).__name__} cannot be counted "
                f"({type(error).__name__}: {error}); explain the model without it"
            ) from error
    parameters = [p for group in own.param_groups for p in group["params"] if p.requires_grad]
    kinds = {_kind(group) for group in own.param_groups}
    return StepRecord(
        optimizer=type(optimizer).__name__,
        kind=kinds.pop() if len(kinds) == 1 else "",
        num_parameters=sum(map(num_elements, parameters)),
        num_tensors=len(parameters),
        bytes_read=counter.moved.read,
        bytes_written=counter.moved.written,
        state_bytes=sum(map(num_bytes, leaf_tensors(list(own.state.values())))),
        refresh_bytes=_refresh(casts, _names(optimizer, model)),
    )


def _copy(
    optimizer: torch.optim.Optimizer, mode: FakeTensorMode, device: str | None
) -> torch.optim.Optimizer:
    """A copy without hooks, whose tensors are fake, with gradients."""
    with mode:
        tensors = leaf_tensors([optimizer.param_groups, list(optimizer.state.values())])
        memo: dict[int, Any] = {id(tensor): fake_copy(tensor, mode, device) for tensor in tensors}
        own = copy.deepcopy(optimizer, memo)
        for parameter in (p for group in own.param_groups for p in group["params"]):
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
    return own


def _choose_kernels(group: dict[str, Any], device: str, *, is_imagined: bool) -> None:
    """Takes lists where the optimizer would by default: it does not for fake tensors.

    On the CPU, which stands for an imagined device, no step can be captured.

    Relies on ``_get_foreach_kernels_supported_devices``, as ``_default_to_fused_or_foreach`` does.
    """
    is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
    if is_open and not group.get("differentiable"):
        group["foreach"] = device in _get_foreach_kernels_supported_devices()
    if is_imagined and "capturable" in group:
        group["capturable"] = False


def _kind(group: dict[str, Any]) -> str:
    if group.get("fused"):
        return "fused"
    if "foreach" not in group:
        return ""
    return "foreach" if group["foreach"] else "for each tensor"


def _step(optimizer: torch.optim.Optimizer, counter: TrafficMode) -> None:
    """One step without the hooks of all optimizers.

    Relies on ``Optimizer`` wrapping ``step`` by ``functools.wraps``.
    """
    step: Callable[..., Any] = inspect.unwrap(type(optimizer).step)
    with torch.no_grad(), counter:
        step(optimizer)


class _StepTraffic(TrafficMode):  # type: ignore[no-untyped-call]
    """Counts ops that need not run: they give nothing, or a number."""

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op, unless it only writes."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return LATER
        if func._schema.is_mutable and not func._schema.returns:
            return None
        return super().run(func, args, kwargs)


def _names(optimizer: torch.optim.Optimizer, model: Callable[..., Any]) -> set[str]:
    """Paths in the model of what the optimizer updates."""
    if not isinstance(model, torch.nn.Module):
        return set()
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) in updated}


def _refresh(casts: Iterable[CastRecord], names: set[str]) -> int:
    """Returns the bytes that computing the cached casts of some weights once reads and writes."""
    kept = {(c.weight, c.to_dtype): c.bytes_moved for c in casts if c.state == "kept"}
    return sum(moved for (weight, _), moved in kept.items() if weight in names)
