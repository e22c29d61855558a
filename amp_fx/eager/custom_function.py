"""``custom_fwd`` and ``custom_bwd``: torch.amp's decorators with support for policies."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from amp_fx.eager.region import check_device_type
from amp_fx.errors import OptionError
from amp_fx.graphs.policy_mode import ambient_policy, policy_applied

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = ...
) -> Callable[[F], F]: ...


@overload
def custom_fwd(fwd: F, *, device_type: str, cast_inputs: torch.dtype | None = ...) -> F: ...


def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorates ``forward`` of a ``torch.autograd.Function``, like ``torch.amp.custom_fwd``.

    Args:
        fwd: The function; if omitted, returns a decorator.
        device_type: As in ``torch.device(...).type``.
        cast_inputs: In an enabled region, casts all floating-point tensors on the device, except
            float64, to this dtype, and disables autocast in ``forward``. Has no effect outside of
            regions.

    Raises:
        RegionError: The device type cannot autocast.
        OptionError: ``cast_inputs`` is not a floating-point dtype.
        TypeError: ``fwd`` is not callable.
    """
    check_device_type(device_type)
    if cast_inputs is not None and not (
        isinstance(cast_inputs, torch.dtype) and cast_inputs.is_floating_point
    ):
        raise OptionError(f"cast_inputs must be a floating-point dtype, got {cast_inputs!r}")
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    _check_callable("custom_fwd", fwd)
    inner = torch.amp.custom_fwd(fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # else Dynamo captures backward in this region
            args[0]._amp_fx_policy = ambient_policy()
        return inner(*args, **kwargs)

    return forward


@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[F], F]: ...


@overload
def custom_bwd(bwd: F, *, device_type: str) -> F: ...


def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorates ``backward`` of a ``torch.autograd.Function`` to run in the state of ``forward``.

    Args:
        bwd: The function; if omitted, returns a decorator.
        device_type: The same as for ``custom_fwd``, which must decorate ``forward``.

    Raises:
        RegionError: The device type cannot autocast.
        TypeError: ``bwd`` is not callable.
    """
    check_device_type(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    _check_callable("custom_bwd", bwd)
    inner = torch.amp.custom_bwd(bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return inner(*args, **kwargs)
        with policy_applied(getattr(args[0], "_amp_fx_policy", None)):
            return inner(*args, **kwargs)

    return backward


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name} can only decorate a function, got {value!r}")
