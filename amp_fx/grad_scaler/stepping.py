"""The two ways in which `GradScaler.step` steps an optimizer."""

from __future__ import annotations

import inspect
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import OptState

from amp_fx.errors import ScalerStateError
from amp_fx.grad_scaler import host_scale, predicated
from amp_fx.grad_scaler.torch_private import runs_only_own_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from amp_fx.grad_scaler.core import ScalerCore
    from amp_fx.grad_scaler.states import OptimizerState


_STEPS_SEEN: weakref.WeakKeyDictionary[Callable[..., Any], bool] = weakref.WeakKeyDictionary()


def refuse_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a closure is passed on, by whatever way; `closure=None` is none."""
    if kwargs.get("closure") is not None or any(callable(arg) for arg in args):
        raise ScalerStateError("Closure use is not currently supported if GradScaler is enabled.")


def step_fused(
    scaler: ScalerCore, optimizer: Any, state: OptimizerState, step: Callable[..., Any]
) -> Any:
    """Step an optimizer that takes `grad_scale` and `found_inf` (torch's contract for it).

    Args:
        scaler: whose scale and checks it takes.
        optimizer: what to step.
        state: the optimizer's.
        step: the optimizer's, with the caller's arguments.
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
    optimizer.found_inf = _flag_for(optimizer, scaler._combine(state.found_inf))
    try:
        return step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _flag_for(optimizer: Any, found_inf: Tensor) -> Tensor | None:
    """The flag, or None where the host knows that it is 0 and only torch's own code would read it.

    With a flag Adam and Adagrad take it off each of their step counters, which costs as much as the
    check.
    """
    is_needless = host_scale.peek(found_inf) == 0.0 and runs_only_own_code(optimizer)
    return None if is_needless else found_inf


def _takes_scaler(step: Callable[..., Any]) -> bool:
    """Whether a step has a `grad_scaler` argument; remembered, as looking takes 50 us."""
    function = getattr(step, "__func__", step)
    known = _STEPS_SEEN.get(function)
    if known is None:
        known = _STEPS_SEEN[function] = "grad_scaler" in inspect.signature(step).parameters
    return known


def step_checked(
    scaler: ScalerCore, optimizer: Any, state: OptimizerState, step: Callable[..., Any]
) -> Any:
    """Step an optimizer whose gradients are unscaled and checked, if they are finite.

    The arguments are those of `step_fused`.
    """
    report = state.report or scaler._report(state)
    is_unknown = report.known_skipped is None
    if is_unknown and _is_capturable(optimizer) and predicated.has_state(optimizer):
        return predicated.step_unless(scaler._combine(state.found_inf), optimizer, step)
    return None if report.learn_skipped() else step()


def _is_capturable(optimizer: Any) -> bool:
    return all(group.get("capturable", False) for group in optimizer.param_groups)
