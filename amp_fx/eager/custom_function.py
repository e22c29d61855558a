"""``custom_fwd`` and ``custom_bwd``: torch.amp's decorators, also for ``setup_context``."""

from __future__ import annotations

import functools
import threading
import types
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch.autograd.function import FunctionCtx

from amp_fx.errors import OptionError
from amp_fx.regions.state import check_device_type
from amp_fx.torch_private.autocast import cast_tensors

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

    Unlike torch's decorator, it supports functions with ``setup_context``, which gets the inputs
    with the casts of ``cast_inputs``. ``torch.compile`` calls these functions in eager code if
    gradients are recorded.

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

    def call(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return fwd(*args, **kwargs) if isinstance(ctx, _State) else fwd(ctx, *args, **kwargs)

    # torch's decorator stores the state of autocast in attributes of the first argument.
    inner = torch.amp.custom_fwd(call, device_type=device_type, cast_inputs=cast_inputs)
    return _forward(fwd, inner, device_type, cast_inputs)


class _State(types.SimpleNamespace):
    """State of autocast in a ``forward`` without ``ctx``, for the ``ctx`` of ``setup_context``."""


_latest = threading.local()
"""The state of the latest ``forward`` without ``ctx`` in each thread."""


def _forward(
    fwd: Callable[..., Any],
    inner: Callable[..., Any],
    device_type: str,
    cast_inputs: torch.dtype | None,
) -> Any:
    """Returns the decorated ``forward``."""

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], FunctionCtx):
            return inner(*args, **kwargs)
        state = _State()
        result = inner(state, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling() and not torch.is_grad_enabled():
            return result  # there is no backward
        is_cast = cast_inputs is not None and torch.is_autocast_enabled(device_type)
        _remember(forward, state, (device_type, cast_inputs) if is_cast else None)
        return result

    return forward


def _remember(forward: Any, state: _State, cast: tuple[str, torch.dtype | None] | None) -> None:
    """Passes the state of a ``forward`` to the ``setup_context`` that is called next."""
    if not hasattr(forward, "_has_setup_context"):
        for function in _functions_with(forward):
            function.setup_context = staticmethod(_setup_context(function.setup_context))
        forward._has_setup_context = True
    _latest.state, _latest.cast = state, cast


# Like torch.compiler.disable, which imports torch._dynamo (seconds): a break of the graph.
_remember._torchdynamo_disable = True  # type: ignore[attr-defined]


def _functions_with(forward: Any) -> list[Any]:
    """Returns the classes that have a ``forward`` and define ``setup_context`` themselves."""
    functions: list[Any] = [torch.autograd.Function]
    for function in functions:
        functions += function.__subclasses__()
    return [f for f in functions if f.forward is forward and "setup_context" in vars(f)]


def _setup_context(inner: Callable[..., Any]) -> Any:
    """Returns a ``setup_context`` that stores the state of ``forward`` and casts its inputs."""

    @functools.wraps(inner)
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        for name, value in vars(_latest.state).items():
            setattr(ctx, name, value)
        if _latest.cast is not None:
            inputs = cast_tensors(inputs, *_latest.cast)
        return inner(ctx, inputs, output)

    return setup_context


def own_code() -> list[types.CodeType]:
    """Returns the code of decorated functions, whose frames Dynamo must skip."""
    decorated = (_forward(custom_fwd, custom_fwd, "", None), _setup_context(custom_fwd))
    return [function.__code__ for function in (*decorated, _remember, _functions_with)]


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
    return torch.amp.custom_bwd(bwd, device_type=device_type)


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name} can only decorate a function, got {value!r}")
