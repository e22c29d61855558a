"""``amp_fx.autocast``: ``torch.autocast``, which can hold a policy of the user's own too.

``custom_fwd`` and ``custom_bwd`` are torch.amp's decorators, which keep the policy as well.

Eager ``torch.utils.checkpoint`` recomputes in the regions of the forward.
It restores the autocast state of two devices, its own and the CPU's; a policy travels in
that of two others (``policy_codes``). It restores a state that is off by a disabled region, which
says full precision where there was no region at all (``state.in_disabled_region``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import torch
from torch.utils import checkpoint

from amp_fx.dtypes import as_dtype
from amp_fx.errors import OptionError, RegionError
from amp_fx.policies.policy import Policy, as_policy
from amp_fx.regions.cache_keys import put_policies_in_keys
from amp_fx.regions.policy_codes import CARRIERS, ambient_policy, codes_of, interned, pin
from amp_fx.regions.state import autocast_device_types, nested_as, nesting
from amp_fx.tables.presets import torch_version

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator
    from types import CodeType

    _Constants = tuple[tuple[torch.dtype, ...], torch.dtype | None]


@functools.cache
def restore_regions() -> None:
    """Changes what checkpoints record from here on, for the whole process.

    Relies on ``checkpoint.CheckpointFunction.forward`` and
    ``checkpoint._checkpoint_without_reentrant_generator`` (``..._impl`` since torch 2.14 or
    2.15) getting the function as argument 1 and 0, and on ``checkpoint.checkpoint`` looking
    both up when it is called.
    """
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpoint, f"{name}_impl"):
        name = f"{name}_impl"
    reentrant = checkpoint.CheckpointFunction.forward
    other = getattr(checkpoint, name)

    @functools.wraps(reentrant)
    def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        return reentrant(ctx, _with_regions_of_now(function), *args)  # type: ignore[no-untyped-call]

    @functools.wraps(other)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return other(_with_regions_of_now(function), *args, **kwargs)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    setattr(checkpoint, name, generator)


def _with_regions_of_now(function: Callable[..., Any]) -> Callable[..., Any]:
    carried, policy, depth = _carried(), ambient_policy(), nesting()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _carrying(carried), nested_as(depth):
            return function(*args, **kwargs)

    call._amp_fx_policy = policy  # type: ignore[attr-defined]  # keeps its number
    return call


_Carried = tuple[tuple[torch.dtype, bool], ...]


def _carried() -> _Carried:
    return tuple((torch.get_autocast_dtype(c), torch.is_autocast_enabled(c)) for c in CARRIERS)


@contextlib.contextmanager
def _carrying(carried: _Carried) -> Iterator[None]:
    before = _carried()
    _set_carried(carried)
    try:
        yield
    finally:
        _set_carried(before)


def _set_carried(carried: _Carried) -> None:
    for carrier, (dtype, is_enabled) in zip(CARRIERS, carried, strict=True):
        torch.set_autocast_dtype(carrier, dtype)
        torch.set_autocast_enabled(carrier, is_enabled)


F = TypeVar("F", bound="Callable[..., Any]")


class AutocastRegion(contextlib.AbstractContextManager[Any, bool | None], Protocol):
    """The result of ``autocast``: a context manager that is also a decorator."""

    def __call__(self, func: F, /) -> F:
        """The function, with every call of it inside the region."""
        ...


def autocast(
    device_type: str,
    dtype: torch.dtype | str | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    policy: Policy | str | os.PathLike[str] | None = None,
) -> AutocastRegion:
    """A region of mixed precision, as ``torch.autocast`` has it, in eager and compiled code.

    Without a policy it is ``torch.autocast``; its arguments mean the same, and an
    unsupported dtype or a missing device turns it off with the same warning. It may be
    entered again while it is active, and by several threads.

    Args:
        device_type: As in ``torch.device(...).type``.
        dtype: What low-precision ops run in, or its name (``"bf16"``); by default what the
            policy says, else ``torch.get_autocast_dtype``.
        enabled: Whether autocast is on in the region.
        cache_enabled: Whether casts of weights are shared inside the region.
        policy: Which op is cast how: a ``Policy``, the name of a preset or the path of a
            policy file (``*.toml``). None keeps the policy of the region around this one, at
            the outermost that of PyTorch. Regions of ``torch.autocast`` inside this one keep
            its policy too.

    Raises:
        RegionError: There is no such device type or dtype; or, on leaving, the region is not
            the innermost active one. The state is then that before the region.
        PolicyError: The policy is none of these.
    """
    given = _checked_dtype(dtype)
    if torch.compiler.is_compiling():
        if policy is None:
            return torch.autocast(device_type, given, enabled, cache_enabled)
        codes, low_dtype = _while_compiling(policy, device_type)
        low_dtype = low_dtype if given is None else given
        return _policy_region(codes, (device_type, low_dtype, enabled, cache_enabled))
    skip_in_dynamo()
    check_device_type(device_type)
    if policy is None:
        return _Region(device_type, given, enabled, cache_enabled)
    found = as_policy(policy)
    low_dtype = found.low_dtype(device_type) if given is None else given
    return _PolicyRegion(found, (device_type, low_dtype, enabled, cache_enabled))


def _checked_dtype(dtype: object) -> Any:
    """A dtype for its name; what is none of either is left for ``torch.autocast`` to refuse."""
    if not isinstance(dtype, str):
        return dtype
    found = as_dtype(dtype)
    if found is None:
        raise RegionError(
            f"dtype={dtype!r} is not a dtype: give torch.bfloat16, torch.float16 or such a name"
        )
    return found


def check_device_type(device_type: object) -> None:
    """Refuses what is no device type that autocast knows."""
    known = autocast_device_types()
    if isinstance(device_type, str) and device_type in known:
        return
    allowed = ", ".join(map(repr, known))
    if isinstance(device_type, str) and device_type.partition(":")[0] in known:
        hint = "give the type alone, without an index"
    else:
        hint = "amp_fx.register_device adds one that torch was given a name for"
    raise RegionError(f"device_type={device_type!r} cannot autocast; use {allowed} ({hint})")


class _Active(threading.local):
    """The regions that a thread is in, innermost last, each with what undoes it."""

    def __init__(self) -> None:
        self.regions: list[tuple[object, contextlib.ExitStack]] = []


_active = _Active()


def _enter(region: object, parts: list[torch.autocast]) -> None:
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(part)
        _active.regions.append((region, stack.pop_all()))


def _leave(region: object) -> None:
    active = _active.regions
    if active and active[-1][0] is region:
        active.pop()[1].close()
        return
    positions = [i for i, (other, _) in enumerate(active) if other is region]
    if not positions:
        raise RegionError(f"{region!r} is left, but this thread is not in it")
    inside = len(active) - 1 - positions[-1]
    while len(active) > positions[-1]:
        active.pop()[1].close()
    raise RegionError(
        f"{region!r} is left before the {inside} region(s) that were entered inside it; "
        "all of them are left now. Leave regions in the reverse order, or use `with`"
    )


class _Region(torch.autocast):
    """``torch.autocast`` that may be entered by several threads, and again while active.

    Dynamo takes an instance of a subclass for the region that its attributes describe.
    """

    def __enter__(self) -> Any:
        _enter(self, [self._one_use()])
        return self

    def __exit__(self, *_: object) -> None:
        _leave(self)

    def _one_use(self) -> torch.autocast:
        """A region with these settings, without a second warning about them."""
        part = torch.autocast.__new__(torch.autocast)
        part.__dict__.update(self.__dict__)
        return part

    def __repr__(self) -> str:
        return f"amp_fx.autocast({self.device!r}, {self.fast_dtype}, enabled={self._enabled})"


class _PolicyRegion:
    """A region that carries a policy.

    It is no subclass of ``torch.autocast``: Dynamo would take it for one, and lose the policy.
    """

    def __init__(self, policy: Policy, settings: tuple[Any, ...]) -> None:
        from amp_fx.regions.kernels import prepare

        prepare(policy, settings[0])
        restore_regions()
        self._name = policy.name
        self._policy = interned(policy)
        self._codes = codes_of(self._policy)
        self._region = _Region(*settings)
        plain = self._region
        self._settings = (plain.device, plain.fast_dtype, plain._enabled, plain._cache_enabled)

    def __enter__(self) -> _PolicyRegion:
        put_policies_in_keys()
        carriers = [
            torch.autocast(carrier, code, enabled=False)
            for carrier, code in zip(CARRIERS, self._codes, strict=True)
        ]
        _enter(self, [*carriers, self._region._one_use()])
        for carrier in CARRIERS:
            # Dynamo's guards compare the dtypes of enabled devices only.
            torch.set_autocast_enabled(carrier, True)
        return self

    def __exit__(self, *_: object) -> None:
        _leave(self)

    def __call__(self, func: F) -> F:
        if not callable(func):
            raise TypeError(f"{self!r} decorates functions, not {type(func).__name__}")
        codes, settings = self._codes, self._settings

        @functools.wraps(func)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            region = _policy_region(codes, settings) if torch.compiler.is_compiling() else self
            with region:
                return func(*args, **kwargs)

        return in_region  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"{self._region!r} with policy {self._name!r}"


@contextlib.contextmanager
def _policy_region(codes: tuple[torch.dtype, ...], settings: tuple[Any, ...]) -> Iterator[None]:
    """Enters a region with a policy, in the form that Dynamo captures."""
    device_type, dtype, enabled, cache_enabled = settings
    with (
        torch.autocast(CARRIERS[0], codes[0], False),
        torch.autocast(CARRIERS[1], codes[1], False),
        torch.autocast(device_type, dtype, enabled, cache_enabled),
    ):
        yield


def _while_compiling(policy: Any, device_type: str) -> _Constants:
    """Dynamo runs this while it compiles; its guard is on the identity of the policy."""
    if _TAKES_OBJECTS or not isinstance(policy, Policy):
        return _as_constants(policy, device_type)
    return _constants_of_object(id(policy), device_type)


_TAKES_OBJECTS = torch_version() >= (2, 13)
"""Whether Dynamo hands objects, and not constants alone, to what it takes for a constant."""


def _constants_of_object(number: int, device_type: str) -> _Constants:
    """The same by ``id``, which is guarded too; the frame that is compiled holds the policy."""
    return _as_constants(ctypes.cast(number, ctypes.py_object).value, device_type)


def _as_constants(policy: Any, device_type: str) -> _Constants:
    """The codes of a policy, and its low dtype for a device."""
    from amp_fx.regions.kernels import prepare

    found = interned(as_policy(policy))
    prepare(found, device_type)
    put_policies_in_keys()
    pin(found)
    return codes_of(found), found.low_dtype(device_type)


# As torch.compiler.assume_constant_result does it, which imports torch._dynamo: seconds.
_as_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]
_constants_of_object._dynamo_marked_constant = True  # type: ignore[attr-defined]


def skip_in_dynamo() -> None:
    """Keeps Dynamo from compiling the functions here as frames of their own.

    After a graph break it tries so with every function that is called. That says nothing of
    inlining: a region in a function that Dynamo compiles is captured. A policy that holds where
    Dynamo compiles, with whatever backend, keeps its number.

    Relies on ``torch._dynamo.eval_frame.skip_code``, ``torch._dynamo.trace_rules.add`` and
    ``torch._dynamo.convert_frame.register_bytecode_hook``.
    """
    if skip_in_dynamo in _done or "torch._dynamo" not in sys.modules:
        return
    _done.append(skip_in_dynamo)
    from torch._dynamo import trace_rules
    from torch._dynamo.convert_frame import register_bytecode_hook
    from torch._dynamo.eval_frame import skip_code

    register_bytecode_hook(_pin_ambient_policy)
    for name in SKIPPED_MODULES:
        trace_rules.add(name)
    functions: list[Any] = [autocast, _checked_dtype, check_device_type, autocast_device_types]
    functions += [_enter, _leave, _Active.__init__]
    functions += [f for c in (_Region, _PolicyRegion) for f in vars(c).values() if callable(f)]
    for function in functions:
        skip_code(function.__code__)


SKIPPED_MODULES = (
    "amp_fx.policies.calls",
    "amp_fx.policies.changes",
    "amp_fx.policies.decide",
    "amp_fx.policies.policy",
    "amp_fx.regions.cache_keys",
    "amp_fx.regions.kernels",
    "amp_fx.regions.module_stack",
    "amp_fx.regions.policy_codes",
    "amp_fx.regions.registered_ops",
)
"""What the eager kernels call; no name that is not a module (``tests/regions``)."""
_done: list[object] = []


def _pin_ambient_policy(code: CodeType, new_code: CodeType) -> None:  # noqa: ARG001
    policy = ambient_policy()
    if policy is not None:
        pin(policy)


@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = ...
) -> Callable[[F], F]: ...


@overload
def custom_fwd(fwd: F, *, device_type: str, cast_inputs: torch.dtype | None = ...) -> F: ...


def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorates ``forward`` of a ``torch.autograd.Function``, as ``torch.amp.custom_fwd`` does.

    Args:
        fwd: The function; without it a decorator is returned.
        device_type: As in ``torch.device(...).type``.
        cast_inputs: If given, a ``forward`` that is called in an enabled region gets its
            floating-point tensors (but float64) on the device in this dtype, and runs with
            autocast off. Outside of a region it has no effect.

    Raises:
        RegionError: The device type cannot autocast.
        OptionError: ``cast_inputs`` is no floating-point dtype.
        TypeError: What is decorated is not callable.
    """
    check_device_type(device_type)
    if cast_inputs is not None and not (
        isinstance(cast_inputs, torch.dtype) and cast_inputs.is_floating_point
    ):
        raise OptionError(f"cast_inputs={cast_inputs!r} is not a floating-point dtype")
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    _check_callable("custom_fwd", fwd)
    inner = torch.amp.custom_fwd(fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        args[0]._amp_fx_policy = (
            torch.get_autocast_dtype(CARRIERS[0]),
            torch.get_autocast_dtype(CARRIERS[1]),
        )
        if not torch.compiler.is_compiling():  # compiled code keeps its policies alive itself
            args[0]._amp_fx_policy_held = ambient_policy()
        return inner(*args, **kwargs)

    return forward


@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[F], F]: ...


@overload
def custom_bwd(bwd: F, *, device_type: str) -> F: ...


def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorates ``backward`` of such a function: it runs in the state that forward ran in.

    Args:
        bwd: The function; without it a decorator is returned.
        device_type: The same as for ``custom_fwd``, which must decorate ``forward``.

    Raises:
        RegionError: The device type cannot autocast.
        TypeError: What is decorated is not callable.
    """
    check_device_type(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    _check_callable("custom_bwd", bwd)
    inner = torch.amp.custom_bwd(bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(*args: Any, **kwargs: Any) -> Any:
        codes = getattr(args[0], "_amp_fx_policy", None)
        if codes is None:  # forward has torch.amp's decorator
            return inner(*args, **kwargs)
        first, second = codes
        with torch.autocast(CARRIERS[0], first, False), torch.autocast(CARRIERS[1], second, False):
            return inner(*args, **kwargs)

    return backward


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name} decorates a function, not {value!r}")
