"""The state of autocast at one place of a program, as a value.

``torch.autocast`` keeps its state in thread-local flags of the dispatcher. A graph is
rewritten long before it runs, so the passes carry that state, and the policy that holds in it, as
an immutable value:
``AutocastState.ambient()`` reads the flags, ``enter`` follows one ``_enter_autocast``
node, ``applied`` sets the flags for as long as an island is evaluated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING

import torch

from amp_fx.regions.policy_numbers import interned
from amp_fx.torch_private.autocast import DisableAutocast, is_any_autocast_enabled, privateuse1_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.policies.policy import Policy

# Highest dispatch key first: with two devices enabled, this is the order in which the
# dispatcher reaches their autocast kernels (c10/core/DispatchKey.h).
_PRIORITY = ("privateuse1", "cuda", "mps", "xla", "hpu", "ipu", "xpu", "maia", "mtia", "cpu")


_NO_DEVICE = "ipu"
"""A device type that no package has ever offered to this torch."""


def autocast_device_types() -> tuple[str, ...]:
    """Device types that this torch can autocast, in dispatch order; to Dynamo a constant.

    Without the one that stands for no device (``called_without_autocast``).
    """
    names = [privateuse1_name() if name == "privateuse1" else name for name in _PRIORITY]
    return tuple(
        name for name in names if name != _NO_DEVICE and torch.amp.is_autocast_available(name)
    )


# Before torch 2.13 Dynamo cannot trace what this calls. For the mark see ``region``.
autocast_device_types._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class AutocastState:
    """The devices that autocast, and their dtypes, at one place of a program.

    Attributes:
        low_dtypes: ``(device_type, dtype)`` for every device type that autocast knows,
            enabled or not: the dtype that a region without ``dtype=`` takes.
        enabled: Device types whose autocast is on, in dispatch order.
        cache_enabled: Whether eager autocast would share casts of leaves.
        policy: The policy of the innermost region that names one; None if none does. ``ambient``
            leaves it out.
    """

    low_dtypes: tuple[tuple[str, torch.dtype], ...]
    enabled: tuple[str, ...]
    cache_enabled: bool
    policy: Policy | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def ambient(cls) -> AutocastState:
        """The state of the calling thread."""
        devices = autocast_device_types()
        return cls(
            low_dtypes=tuple((device, torch.get_autocast_dtype(device)) for device in devices),
            enabled=tuple(filter(torch.is_autocast_enabled, devices)),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

    def low_dtype(self, device_type: str) -> torch.dtype:
        """The dtype that ``lower_precision_fp`` ops take on a device type."""
        return dict(self.low_dtypes)[device_type]

    def markers(self) -> list[tuple[str, torch.dtype, bool, bool]]:
        """Arguments of the ``_enter_autocast`` nodes that bring this state about, in order."""
        return [
            (device, self.low_dtype(device), True, self.cache_enabled)
            for device in reversed(self.enabled)
        ]

    def with_policy(self, policy: Policy) -> AutocastState:
        """This state with another policy."""
        return dataclasses.replace(self, policy=interned(policy))

    def turned(
        self,
        device_type: str,
        *,
        enabled: bool,
        dtype: torch.dtype | None = None,
        cache_enabled: bool | None = None,
    ) -> AutocastState:
        """This state with one device switched; None keeps what is."""
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
        """This state with all devices off."""
        return dataclasses.replace(self, enabled=())

    def enter(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> AutocastState:
        """The state inside ``torch.autocast(...)`` with these arguments.

        ``torch.autocast`` itself decides what an unsupported dtype or a missing device
        does (it warns and turns the region off), so that it is asked here.
        """
        # ``applied`` keeps the cache off, which is not what the region shall inherit.
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
        """Sets the calling thread's autocast flags to this state, and back.

        Unlike ``torch.autocast`` this works for a device that the machine lacks, so that
        fake tensors of any device can be run under it. It keeps the cast cache off:
        casts of fake tensors must not end up in it. It leaves the regions that an exception
        inside it has kept code from leaving.
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


def no_autocast() -> contextlib.AbstractContextManager[None]:
    """Turns autocast off for every device, for code whose casts are already nodes.

    Relies on ``torch._C._DisableAutocast``, which excludes all autocast dispatch keys;
    a region entered inside it is on again, so that islands still work.
    """
    guard: contextlib.AbstractContextManager[None] = DisableAutocast()
    return guard


@contextlib.contextmanager
def called_without_autocast() -> Iterator[None]:
    """Makes what AOTAutograd compiles inside it run with autocast off, backwards too.

    AOTAutograd does so if autocast is on where it compiles. Here it is on for a device that no
    tensor is ever on, so that nothing is traced otherwise. Relies on
    ``torch._C._is_any_autocast_enabled`` asking for that device.
    """
    before = torch.is_autocast_enabled(_NO_DEVICE)
    torch.set_autocast_enabled(_NO_DEVICE, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(_NO_DEVICE, before)


@contextlib.contextmanager
def left_on_error() -> Iterator[None]:
    """Leaves the regions that an exception has kept the markers of a graph from leaving.

    Else the thread stays inside of a region, and casts of weights in autocast's cache for good.
    Graphs are run when they are called, and also when they are traced.
    """
    before, depth = AutocastState.ambient(), _nesting()
    try:
        yield
    except BaseException:
        _leave_down_to(depth)
        _set_flags(before)
        raise


def _leave_down_to(depth: int) -> None:
    """Leaves the innermost regions of the thread until ``depth`` are left."""
    if _nesting() <= depth:
        return
    while _nesting() > depth:
        torch.autocast_decrement_nesting()
    if not depth:
        torch.clear_autocast_cache()


def nesting() -> int:
    """Counts the thread's regions, disabled ones too; without those of a recomputation.

    Relies on ``torch.autocast`` counting the regions that it enters.
    """
    return _nesting() - _recomputation.depth


def in_disabled_region() -> bool:
    """Returns True if the thread is in regions, of which none is on: full precision was asked for.

    No device is on either where no region is, but there a graph may be one of its own. Guards call
    this before each call of compiled code.
    """
    return nesting() > 0 and not _is_any_enabled()


def _is_any_enabled() -> bool:
    """Returns True if autocast is on for any device.

    ``torch._C._is_any_autocast_enabled`` is quick but does not ask for all: MPS is left out.
    """
    is_any = is_any_autocast_enabled()
    return is_any or any(map(torch.is_autocast_enabled, autocast_device_types()))


@contextlib.contextmanager
def nested_as(depth: int) -> Iterator[None]:
    """Makes ``nesting`` what it was elsewhere, for checkpoints that restore the state of there."""
    before = _recomputation.depth
    _recomputation.depth = _nesting() - depth
    try:
        yield
    finally:
        _recomputation.depth = before


class _Recomputation(threading.local):
    """Regions that a thread is in because a checkpoint restores the state of its forward."""

    depth = 0


_recomputation = _Recomputation()


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
