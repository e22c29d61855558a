"""The autocast state at one point of a program, as an immutable value.

``torch.autocast`` stores its state in thread-local flags of the dispatcher. Passes rewrite a graph
long before it runs, so they need the state and its policy as a value. ``AutocastState.ambient``
reads the flags, ``enter`` returns the state after an ``_enter_autocast`` node, and ``applied`` sets
the flags while an opaque node is evaluated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING

import torch

from amp_fx.errors import RegionError
from amp_fx.regions.policy_numbers import interned
from amp_fx.torch_private.autocast import DisableAutocast, is_any_autocast_enabled, privateuse1_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.policies.policy import Policy

# From the highest dispatch key to the lowest (c10/core/DispatchKey.h): the order in which the
# dispatcher calls autocast kernels if autocast is enabled for several devices.
_PRIORITY = ("privateuse1", "cuda", "mps", "xla", "hpu", "ipu", "xpu", "maia", "mtia", "cpu")


_NO_DEVICE = "ipu"
"""A device type without any backend (``called_without_autocast``)."""


def autocast_device_types() -> tuple[str, ...]:
    """Returns the device types with autocast, in dispatch order."""
    names = [privateuse1_name() if name == "privateuse1" else name for name in _PRIORITY]
    return tuple(
        name for name in names if name != _NO_DEVICE and torch.amp.is_autocast_available(name)
    )


def check_device_type(device_type: object) -> None:
    """Raises an error unless autocast supports a device type."""
    supported = autocast_device_types()
    if isinstance(device_type, str) and device_type in supported:
        return
    allowed = ", ".join(map(repr, supported))
    if isinstance(device_type, str) and device_type.partition(":")[0] in supported:
        hint = "pass the type without an index"
    else:
        hint = "or add a PrivateUse1 backend with amp_fx.register_device"
    raise RegionError(f"device_type={device_type!r} cannot autocast; use {allowed} ({hint})")


@dataclasses.dataclass(frozen=True)
class AutocastState:
    """Devices with autocast enabled, and their dtypes, at one point of a program.

    Attributes:
        low_dtypes: ``(device_type, dtype)`` for every device type with autocast, enabled or not.
            The dtype is the default of new regions.
        enabled: Device types with autocast enabled, in dispatch order.
        cache_enabled: Whether eager autocast caches casts of leaves.
        policy: The policy of the innermost region with a policy, or None. ``ambient`` does not set
            it.
    """

    low_dtypes: tuple[tuple[str, torch.dtype], ...]
    enabled: tuple[str, ...]
    cache_enabled: bool
    policy: Policy | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def ambient(cls) -> AutocastState:
        """Returns the state of the calling thread."""
        devices = autocast_device_types()
        return cls(
            low_dtypes=tuple((device, torch.get_autocast_dtype(device)) for device in devices),
            enabled=tuple(filter(torch.is_autocast_enabled, devices)),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

    def low_dtype(self, device_type: str) -> torch.dtype:
        """Returns the dtype of ``lower_precision_fp`` ops on a device type."""
        return dict(self.low_dtypes)[device_type]

    def markers(self) -> list[tuple[str, torch.dtype, bool, bool]]:
        """Returns the arguments of the ``_enter_autocast`` nodes that set this state, in order."""
        return [
            (device, self.low_dtype(device), True, self.cache_enabled)
            for device in reversed(self.enabled)
        ]

    def with_policy(self, policy: Policy) -> AutocastState:
        """Returns this state with another policy."""
        return dataclasses.replace(self, policy=interned(policy))

    def turned(
        self,
        device_type: str,
        *,
        enabled: bool,
        dtype: torch.dtype | None = None,
        cache_enabled: bool | None = None,
    ) -> AutocastState:
        """Returns this state with the settings of one device changed; None changes nothing."""
        low_dtypes = tuple(
            (device, dtype if dtype is not None and device == device_type else low)
            for device, low in self.low_dtypes
        )
        others = set(self.enabled) - {device_type}
        on = others | {device_type} if enabled else others
        return dataclasses.replace(
            self,
            low_dtypes=low_dtypes,
            enabled=tuple(device for device, _ in low_dtypes if device in on),
            cache_enabled=self.cache_enabled if cache_enabled is None else cache_enabled,
        )

    def turned_off(self) -> AutocastState:
        """Returns this state with autocast disabled for all devices."""
        return dataclasses.replace(self, enabled=())

    def enter(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> AutocastState:
        """Returns the state inside a region of ``torch.autocast`` with these arguments.

        Constructs the region, because ``torch.autocast`` warns and disables itself for unsupported
        dtypes and missing devices.
        """
        # ``applied`` disables the cache, which the region must not inherit.
        cache_enabled = self.cache_enabled if cache_enabled is None else cache_enabled
        with self.applied():
            region = torch.autocast(
                device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled
            )
        return self.turned(
            device_type,
            enabled=region._enabled,
            dtype=region.fast_dtype,
            cache_enabled=region._cache_enabled,
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the calling thread's autocast flags have this state.

        Unlike ``torch.autocast``, it works for devices that the machine lacks, so that fake tensors
        of any device can be evaluated. The cast cache is off, because it must not contain casts of
        fake tensors. On exit, also exits regions that an exception left open.
        """
        before, depth = AutocastState.ambient(), _nesting()
        try:
            _set_flags(dataclasses.replace(self, cache_enabled=False))
            yield
        finally:
            _leave_down_to(depth)
            _set_flags(before)


def _set_flags(state: AutocastState) -> None:
    for device_type, dtype in state.low_dtypes:
        torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_enabled(device_type, device_type in state.enabled)
    torch.set_autocast_cache_enabled(state.cache_enabled)


no_autocast: Callable[[], contextlib.AbstractContextManager[None]] = DisableAutocast
"""Context in which autocast is off for every device.

``torch._C._DisableAutocast`` excludes all autocast dispatch keys. A region that is entered inside
the context, such as that of an opaque node, enables autocast again.
"""


@contextlib.contextmanager
def called_without_autocast() -> Iterator[None]:
    """Context in which AOTAutograd generates code that disables autocast, in the backward as well.

    AOTAutograd generates such code if autocast is enabled during compilation. The context enables
    autocast for a device without tensors, which does not affect the trace. Relies on
    ``torch._C._is_any_autocast_enabled`` checking that device.
    """
    before = torch.is_autocast_enabled(_NO_DEVICE)
    torch.set_autocast_enabled(_NO_DEVICE, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(_NO_DEVICE, before)


@contextlib.contextmanager
def left_on_error() -> Iterator[None]:
    """Context that exits the regions of a graph if an exception skips its markers.

    Otherwise the thread would remain in a region, and casts of weights in autocast's cache. This
    applies to graphs that are called and to graphs that are traced.
    """
    before, depth = AutocastState.ambient(), _nesting()
    try:
        yield
    except BaseException:
        _leave_down_to(depth)
        _set_flags(before)
        raise


def _leave_down_to(depth: int) -> None:
    """Exits the innermost regions of the thread until ``depth`` regions remain."""
    if _nesting() <= depth:
        return
    while _nesting() > depth:
        torch.autocast_decrement_nesting()
    if not depth:
        torch.clear_autocast_cache()


def nesting() -> int:
    """Returns the number of regions around the caller, including disabled ones.

    Excludes regions that a checkpoint entered for a recomputation. Relies on ``torch.autocast``
    counting the regions that it enters.
    """
    return _nesting() - _recomputation.depth


def in_disabled_region() -> bool:
    """Returns True if the thread is in regions and all of them are disabled.

    A disabled region requests full precision. Without any region, compiled code may autocast by its
    options. Guards call this function before each call of compiled code.
    """
    # torch's function is fast but does not check all devices: it omits MPS.
    if not nesting() or is_any_autocast_enabled():
        return False
    return not any(map(torch.is_autocast_enabled, autocast_device_types()))


@contextlib.contextmanager
def nested_as(depth: int) -> Iterator[None]:
    """Context in which ``nesting`` returns ``depth``, for checkpoints that restore a state."""
    before = _recomputation.depth
    _recomputation.depth = _nesting() - depth
    try:
        yield
    finally:
        _recomputation.depth = before


class _Recomputation(threading.local):
    """Number of regions that a checkpoint entered to restore the state of its forward."""

    depth = 0


_recomputation = _Recomputation()


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
