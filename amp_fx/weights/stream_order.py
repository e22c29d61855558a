"""Orders streams that refresh cached values and streams that use them.

A call that needs a stale value refreshes it on the current stream. A later call on another stream
must wait for that refresh, because users do not synchronize streams for the cache. CPUs have no
streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class StreamOrder:
    """Streams that calls used on each device, and the event of the last refresh on each stream.

    Attributes:
        now: Number of allocations of memory for values. ``has_other_readers`` compares it with the
            number at the latest call on each stream.
    """

    def __init__(self) -> None:
        self.now = 0
        self._events: dict[torch.device, dict[int, torch.Event]] = {}
        self._streams: dict[torch.device, dict[int, int]] = {}

    def allocated(self) -> int:
        """Counts an allocation; returns a number for ``has_other_readers``."""
        self.now += 1
        return self.now

    def record(self, devices: Sequence[torch.device]) -> None:
        """Records that values on these devices were refreshed on the current streams."""
        self.note(devices)
        for device in devices:
            stream = torch.accelerator.current_stream(device)
            self._events.setdefault(device, {})[stream.stream_id] = stream.record_event()

    def note(self, devices: Iterable[torch.device]) -> None:
        """Records that the current streams read values.

        Call it when the values are known and before the call has left: until then, no memory of
        values is reused.
        """
        for device in devices:
            stream = torch.accelerator.current_stream(device)
            self._streams.setdefault(device, {})[stream.stream_id] = self.now

    def wait(self, devices: Iterable[torch.device]) -> None:
        """Makes the current streams wait for refreshes on other streams."""
        for device in devices:
            stream = torch.accelerator.current_stream(device)
            for stream_id, event in list(self._events.get(device, {}).items()):
                if stream_id != stream.stream_id:
                    stream.wait_event(event)

    def are_several(self, devices: Iterable[torch.device] | None = None) -> bool:
        """Returns True if calls used several streams of a device.

        Args:
            devices: The devices to check; None for all.
        """
        checked = self._streams if devices is None else devices
        return any(len(self._streams.get(device, ())) > 1 for device in checked)

    def has_other_readers(self, device: torch.device, allocated: int) -> bool:
        """Returns True if other streams than the current one may still read a value.

        A stream whose latest call was before the value's memory was allocated does not.

        Args:
            device: The device of the value.
            allocated: The result of ``allocated`` for its memory.
        """
        streams = self._streams.get(device, {})
        if len(streams) < 2:
            return False
        current = torch.accelerator.current_stream(device).stream_id
        return any(at >= allocated for stream, at in streams.items() if stream != current)

    def hold(self, values: Sequence[torch.Tensor]) -> None:
        """Prevents reuse of the values' memory until the current streams have read it."""
        if not self.are_several():
            return
        for value in values:
            if len(self._streams.get(value.device, ())) > 1:
                value.record_stream(torch.accelerator.current_stream(value.device))


_WITHOUT_STREAMS = ("cpu", "meta", "mps")  # mps has one stream


def accelerator_devices(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """Returns the devices of tensors, without devices that have no streams."""
    devices = dict.fromkeys(t.device for t in tensors)
    return tuple(device for device in devices if device.type not in _WITHOUT_STREAMS)
