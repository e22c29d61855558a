"""Follows the autocast regions of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.graphs.locations import NodeLocation
from amp_fx.observe.recorder import Sink
from amp_fx.regions.state import autocast_device_types
from amp_fx.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclasses.dataclass(eq=False)
class Region:
    """One autocast region that the step entered.

    Attributes:
        device_type: Its device type.
        dtype: Its low dtype.
        is_enabled: Whether it casts.
        is_asked: Whether the program asked for casts; torch turns a region off if the device is
            not present, or the dtype is not one to cast to.
        site: The line that entered it.
    """

    device_type: str
    dtype: torch.dtype
    is_enabled: bool
    is_asked: bool
    site: NodeLocation


class Regions(Sink):
    """The autocast regions that a step is in.

    Below the dispatcher, autocast is off whatever the region is, so the state cannot be read
    there. Every region, also of ``amp_fx.autocast`` and of checkpoints, is entered by
    ``torch.autocast.__enter__``; this class replaces it meanwhile.
    """

    def __init__(self) -> None:
        self.entered: list[Region] = []
        """The regions that the step is in, outermost first."""

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Context manager that observes each region."""
        for device_type in autocast_device_types():
            if torch.is_autocast_enabled(device_type):
                dtype = torch.get_autocast_dtype(device_type)
                self.entered.append(Region(device_type, dtype, True, True, NodeLocation()))
        with replaced(
            (torch.autocast, "__init__", _after(self._created, torch.autocast.__init__)),
            (torch.autocast, "__enter__", _after(self._entering, torch.autocast.__enter__)),
            (torch.autocast, "__exit__", _after(self._leaving, torch.autocast.__exit__)),
        ):
            yield

    def close(self) -> None:
        """Forgets the regions around the audit, for code that runs outside of regions."""
        self.entered.clear()

    def innermost(self, device_type: str) -> Region | None:
        """Returns the innermost region of a device type that is entered."""
        regions = (each for each in reversed(self.entered) if each.device_type == device_type)
        return next(regions, None)

    def outer(self, inner: Region) -> Region | None:
        """Returns the innermost enabled region of the same device type around a region."""
        around = self.entered[: self.entered.index(inner)]
        enabled = (r for r in reversed(around) if r.is_enabled)
        return next((r for r in enabled if r.device_type == inner.device_type), None)

    def _created(self, region: torch.autocast, *args: Any, **kwargs: Any) -> None:
        positional = args[2] if len(args) > 2 else True
        vars(region)["_amp_fx_is_asked"] = kwargs.get("enabled", positional)

    def _entering(self, region: torch.autocast) -> None:
        enabled = bool(region._enabled)
        is_asked = bool(vars(region).get("_amp_fx_is_asked", enabled))
        dtype = region.fast_dtype
        assert dtype is not None
        self.entered.append(Region(region.device, dtype, enabled, is_asked, self.recorder.here()))

    def _leaving(self, region: torch.autocast, *_: object) -> None:
        del region
        if self.entered:
            self.entered.pop()


def _after(before: Callable[..., None], method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that calls another function first."""

    @functools.wraps(method)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return method(*args, **kwargs)

    return replacement
