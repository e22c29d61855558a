"""What the host knows of the scale without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

# Above this no decision depends on the scale, so a read that is under way is soon enough.
_LOOK_BELOW = 1024.0


def peek(value: Tensor) -> float | None:
    """The value of a 0-dim tensor where reading it waits for nothing: on the CPU."""
    return value.item() if value.is_cpu else None


def wait_for(value: Tensor) -> float:
    """The value of a 0-dim tensor; waits for the device to get there."""
    return float(value.item())


def module_with_events(value: Tensor) -> Any:
    """The module of a tensor's device, if it has streams and events as CUDA has; else None.

    MPS has events, and no copy to the host that is known not to wait: there the bound is not raised
    again, and steps go on checking gradients once more, unscaled.
    """
    return torch.get_device_module(value.device) if value.device.type in ("cuda", "xpu") else None


def _is_capturing(module: Any) -> bool:
    """Whether what is done now is recorded in a graph; XPU has none in all torches."""
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


@dataclass
class _Read:
    """A copy of the scale on its way to the host."""

    value: Tensor
    event: Any
    num_updates_since: int = 0


class HostScale:
    """A lower bound of the scale, and its value when last seen.

    On the CPU both are exact. On a device the bound assumes that each update of unknown outcome
    backed off, until a copy that was started without waiting has arrived.

    Attributes:
        lower_bound: the scale is at least this.
        seen: the newest value that was read, or None.
    """

    def __init__(self, value: float) -> None:
        """Start from a scale that the host chose."""
        self.tell(value)

    def tell(self, value: float | None) -> None:
        """The scale was set to a value; None if only the device knows which."""
        self.lower_bound = 0.0 if value is None else value
        self.seen = value
        self._read: _Read | None = None

    def follow_update(self, scale: Tensor, backoff_factor: float, skipped: bool | None) -> None:
        """The scale was updated; `skipped` is None if only the device knows whether a step was."""
        value = peek(scale)
        if value is not None:
            self.lower_bound = self.seen = value
            return
        if skipped is not False:
            self.lower_bound *= backoff_factor
        module = module_with_events(scale)
        if module is not None and not _is_capturing(module):
            self._look(scale, backoff_factor, module)

    def tell_floor(self, floor: float) -> None:
        """The scale was raised to at least this."""
        self.lower_bound = max(self.lower_bound, floor)
        if self.seen is not None:
            self.seen = max(self.seen, floor)

    def _look(self, scale: Tensor, backoff_factor: float, module: Any) -> None:
        """Take in a copy that has arrived; start another where the bound gets low."""
        read = self._read
        if read is not None:
            read.num_updates_since += 1
            if not read.event.query():
                return
            self.seen = float(cast("float", read.value.tolist()))
            since_then = backoff_factor**read.num_updates_since
            self.lower_bound = max(self.lower_bound, self.seen * since_then)
            self._read = None
        if self.lower_bound < _LOOK_BELOW:
            value = torch.empty((), dtype=torch.float32, pin_memory=True)
            event = module.Event()
            with module.device(scale.device):
                value.copy_(scale, non_blocking=True)
                event.record()
            self._read = _Read(value, event)
