"""``amp_fx.autocast``: ``torch.autocast``, which can hold a policy of the user's own too."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from amp_fx.dtypes import as_dtype
from amp_fx.eager.checkpoints import restore_regions
from amp_fx.errors import RegionError
from amp_fx.graphs import policy_calls, policy_mode
from amp_fx.graphs.policy_mode import PolicyMode, ambient_policy, policy_applied
from amp_fx.policies import policy as policy_module
from amp_fx.policies.policy import Policy, as_policy, preset
from amp_fx.regions import policy_numbers
from amp_fx.regions.policy_numbers import interned, number_of, pin
from amp_fx.regions.state import autocast_device_types

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator


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
    if torch.compiler.is_dynamo_compiling():
        if policy is None:
            return torch.autocast(device_type, given, enabled, cache_enabled)
        number, low_dtype = _while_compiling(policy, device_type)
        low_dtype = low_dtype if given is None else given
        return _captured_region(number, (device_type, low_dtype, enabled, cache_enabled))
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
        restore_regions()
        self._name = policy.name
        self._policy = interned(policy)
        self._is_default = policy == preset("torch")
        self._region = _Region(*settings)
        plain = self._region
        self._settings = (plain.device, plain.fast_dtype, plain._enabled, plain._cache_enabled)

    def __enter__(self) -> _PolicyRegion:
        # Native autocast is the default policy, and modules look for function modes.
        is_native = self._is_default and ambient_policy() is None
        policy = None if is_native else self._policy
        _enter(self, [policy_applied(policy), self._region._one_use()])
        return self

    def __exit__(self, *_: object) -> None:
        _leave(self)

    def __call__(self, func: F) -> F:
        if not callable(func):
            raise TypeError(f"{self!r} decorates functions, not {type(func).__name__}")
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
    """Enters a region with a policy, in the form that Dynamo captures."""
    with PolicyMode(number), torch.autocast(*settings):
        yield


def _while_compiling(policy: Any, device_type: str) -> tuple[int, torch.dtype | None]:
    """Returns the number of a policy, and its low dtype for a device.

    Dynamo runs this while it compiles; its guard is on the identity of the policy.
    """
    found = as_policy(policy)
    return pin(found), found.low_dtype(device_type)


# As torch.compiler.assume_constant_result does it, which imports torch._dynamo: seconds.
_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _skip_in_dynamo() -> None:
    """Keeps Dynamo from compiling the functions here as frames of their own.

    After a graph break it tries so with every function that is called. That says nothing of
    inlining: a region in a function that Dynamo compiles is captured.

    Relies on ``torch._dynamo.eval_frame.skip_code`` and ``torch._dynamo.trace_rules.add``.
    """
    from amp_fx.torch_private.dynamo import skip_frames, trace_rules

    for module in (policy_module, policy_numbers):
        trace_rules.add(module.__name__)
    functions: list[Any] = [autocast, _checked_dtype, check_device_type, autocast_device_types]
    functions += [_enter, _leave, _Active.__init__, *policy_mode.SKIPPED, *policy_calls.SKIPPED]
    functions += [f for c in (_Region, _PolicyRegion) for f in vars(c).values() if callable(f)]
    skip_frames(functions)


def skip_in_dynamo() -> None:
    """Does so once Dynamo is there."""
    if "torch._dynamo" in sys.modules:
        _skip_in_dynamo()
