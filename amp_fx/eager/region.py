"""``amp_fx.autocast``: ``torch.autocast`` with custom policies."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import torch

from amp_fx.dtypes import as_dtype
from amp_fx.eager.checkpoints import restore_regions
from amp_fx.errors import ArgumentTypeError, RegionError, did_you_mean
from amp_fx.graphs import policy_mode
from amp_fx.graphs.policy_mode import PolicyMode, ambient_policy, use_policy
from amp_fx.policies import policy as policy_module
from amp_fx.policies.policy import Policy, as_policy, preset
from amp_fx.regions import policy_numbers
from amp_fx.regions.policy_numbers import interned, number_of, pin
from amp_fx.regions.state import autocast_device_types, check_device_type

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator


F = TypeVar("F", bound="Callable[..., Any]")


class AutocastRegion(contextlib.AbstractContextManager[Any, bool | None], Protocol):
    """Result of ``autocast``: a context manager that is also a decorator."""

    def __call__(self, func: F, /) -> F:
        """Decorates a function, so that its calls run in the region."""
        ...


def autocast(
    device_type: str,
    dtype: torch.dtype | str | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    policy: Policy | str | os.PathLike[str] | None = None,
    **unknown: NoReturn,
) -> AutocastRegion:
    """A mixed-precision region like ``torch.autocast``, with a policy for compiled code.

    Without a policy, it is equivalent to ``torch.autocast``: the arguments have the same meaning,
    and an unsupported dtype or a missing device disables the region with the same warning. A region
    may be entered again while it is active, and by several threads.

    Args:
        device_type: As in ``torch.device(...).type``.
        dtype: The dtype of low-precision ops, or its name (``"bf16"``). Defaults to the dtype of
            the policy, else ``torch.get_autocast_dtype``.
        enabled: Whether autocast is enabled in the region.
        cache_enabled: Whether casts of weights are shared inside the region.
        policy: The cast policy of each op: a ``Policy``, the name of a preset or the path of a
            policy file (``*.toml``). Defaults to the policy of the surrounding region, or to
            PyTorch's policy. Regions of ``torch.autocast`` inside this region inherit its policy.
            It applies to code that amp_fx compiles; eager code follows ``torch.autocast``, with a
            warning for each function in which the policy differs.
        unknown: No other argument is accepted.

    Raises:
        ArgumentTypeError: An argument is unknown. The message suggests a similar one.
        RegionError: The device type or dtype does not exist; or, on exit, the region is not the
            innermost active one. The state before the region is then restored.
        PolicyError: The policy is invalid.
    """
    for name in unknown:
        hint = did_you_mean(name, inspect.signature(autocast).parameters)
        raise ArgumentTypeError(f"amp_fx.autocast has no argument {name!r}{hint}")
    checked_dtype = _checked_dtype(dtype)
    if torch.compiler.is_dynamo_compiling():
        if policy is None:
            return torch.autocast(device_type, checked_dtype, enabled, cache_enabled)
        number, low_dtype = _while_compiling(policy, device_type)
        low_dtype = low_dtype if checked_dtype is None else checked_dtype
        return _captured_region(number, (device_type, low_dtype, enabled, cache_enabled))
    skip_in_dynamo()
    check_device_type(device_type)
    if policy is None:
        return _Region(device_type, checked_dtype, enabled, cache_enabled)
    resolved = as_policy(policy)
    low_dtype = resolved.low_dtype(device_type) if checked_dtype is None else checked_dtype
    return _PolicyRegion(resolved, (device_type, low_dtype, enabled, cache_enabled))


def _checked_dtype(dtype: object) -> Any:
    """Returns the dtype with a name. Non-strings are returned for ``torch.autocast`` to check."""
    if not isinstance(dtype, str):
        return dtype
    parsed = as_dtype(dtype)
    if parsed is None:
        raise RegionError(
            f"dtype={dtype!r} is not a dtype: pass torch.bfloat16, torch.float16 or a name of one"
        )
    return parsed


class _Active(threading.local):
    """The active regions of a thread, innermost last, each with the stack that exits it."""

    def __init__(self) -> None:
        self.regions: list[tuple[object, contextlib.ExitStack]] = []


_active = _Active()


def _enter(region: object, parts: list[Any]) -> None:
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
        raise RegionError(f"cannot exit {region!r}: this thread has not entered it")
    num_inside = len(active) - 1 - positions[-1]
    while len(active) > positions[-1]:
        active.pop()[1].close()
    raise RegionError(
        f"{region!r} was exited before the {num_inside} region(s) inside it; all of them have been "
        "exited now. Exit regions in reverse order, or use `with`"
    )


class _Region(torch.autocast):
    """``torch.autocast`` that several threads may enter, and that may be entered repeatedly.

    Dynamo treats an instance of a subclass like a region with the same attributes.
    """

    def __enter__(self) -> Any:
        _enter(self, [self._one_use()])
        return self

    def __exit__(self, *_: object) -> None:
        _leave(self)

    def _one_use(self) -> torch.autocast:
        """Returns a new region with these settings; does not repeat warnings about them."""
        region = torch.autocast.__new__(torch.autocast)
        region.__dict__.update(self.__dict__)
        return region

    def __repr__(self) -> str:
        return f"amp_fx.autocast({self.device!r}, {self.fast_dtype}, enabled={self._enabled})"


class _PolicyRegion:
    """A region with a policy.

    Not a subclass of ``torch.autocast``, because Dynamo would treat it as such and ignore the
    policy.
    """

    def __init__(self, policy: Policy, settings: tuple[Any, ...]) -> None:
        restore_regions()
        self._name = policy.name
        self._policy = interned(policy)
        self._is_default = policy == preset("torch")
        self._region = _Region(*settings)
        plain = self._region
        self._settings = (plain.device, plain.fast_dtype, plain._enabled, plain._cache_enabled)

    def __enter__(self) -> _PolicyRegion:
        # Native autocast implements the default policy. A mode is avoided where possible, because
        # some modules check for active function modes.
        is_native = self._is_default and ambient_policy() is None
        policy = None if is_native else self._policy
        _enter(self, [use_policy(policy), self._region._one_use()])
        return self

    def __exit__(self, *_: object) -> None:
        _leave(self)

    def __call__(self, func: F) -> F:
        if not callable(func):
            raise TypeError(f"{self!r} can only decorate functions, got {type(func).__name__}")
        number, settings = number_of(self._policy), self._settings

        @functools.wraps(func)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            is_captured = torch.compiler.is_dynamo_compiling()
            with _captured_region(number, settings) if is_captured else self:
                return func(*args, **kwargs)

        return in_region  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"{self._region!r} with policy {self._name!r}"


@contextlib.contextmanager
def _captured_region(number: int, settings: tuple[Any, ...]) -> Iterator[None]:
    """Region with a policy, in a form that Dynamo can capture."""
    with PolicyMode(number), torch.autocast(*settings):
        yield


def _while_compiling(policy: Any, device_type: str) -> tuple[int, torch.dtype | None]:
    """Returns the number of a policy, and its low dtype for a device.

    Dynamo runs this function at compile time and guards on the identity of the policy.
    """
    resolved = as_policy(policy)
    return pin(resolved), resolved.low_dtype(device_type)


# Equivalent to torch.compiler.assume_constant_result, which would import torch._dynamo (seconds).
_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _skip_in_dynamo() -> None:
    """Makes Dynamo skip the frames of functions that implement regions.

    After a graph break, Dynamo tries to compile every function that is called. Inlining is not
    affected: a region in a function that Dynamo compiles is captured.

    Relies on ``torch._dynamo.eval_frame.skip_code`` and ``torch._dynamo.trace_rules.add``.
    """
    from amp_fx.eager import custom_function
    from amp_fx.torch_private.dynamo import skip_code, skip_frames, trace_rules

    for module in (policy_module, policy_numbers):
        trace_rules.add(module.__name__)
    functions: list[Any] = [autocast, _checked_dtype, check_device_type, autocast_device_types]
    functions += [_enter, _leave, _Active.__init__, *policy_mode.SKIPPED]
    for region_class in (_Region, _PolicyRegion):
        functions += [value for value in vars(region_class).values() if callable(value)]
    skip_frames(functions)
    for code in custom_function.own_code():
        skip_code(code)


def skip_in_dynamo() -> None:
    """Calls ``_skip_in_dynamo`` once Dynamo is imported."""
    if "torch._dynamo" in sys.modules:
        _skip_in_dynamo()
