"""Orders streams that refresh cached values and streams that use them.

A call that needs a stale value refreshes it on the current stream. A later call on another stream
must wait for that refresh, because users do not synchronize streams for the cache. CPUs have no
streams.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class StreamOrder:
    """Streams that calls used on each device, and the event of the last refresh on each stream.

    A count of allocations orders allocations and calls. A stream whose latest call was before the
    memory of a value was allocated has never read that memory.
    """

    def __init__(self) -> None:
        self._events: dict[torch.device, dict[int, torch.Event]] = {}
        self._streams: dict[torch.device, dict[int, int]] = {}
        self._num_allocated = 0
        self._lock = threading.Lock()

    def allocated(self) -> int:
        """Counts an allocation; call it before any call can find the memory.

        Returns:
            A number to compare with that of ``free_since``.
        """
        self._num_allocated += 1
        return self._num_allocated

    def free_since(self, device: torch.device) -> int:
        """Returns a number: other streams have not read memory that was allocated since.

        The streams are those of a device, without its current one.
        """
        if device not in self._streams:
            return 0
        current = torch.accelerator.current_stream(device).stream_id
        with self._lock:
            others = [at for stream, at in self._streams[device].items() if stream != current]
        # A call notes the number of the last allocation before it, and may read that memory.
        return 1 + max(others, default=-1)

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
            with self._lock:  # two threads may use one stream
                self._streams.setdefault(device, {})[stream.stream_id] = self._num_allocated

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

    def hold(self, values: Sequence[torch.Tensor]) -> None:
        """Prevents reuse of the values' memory until the current streams have read it."""
        for value in values:
            if len(self._streams.get(value.device, ())) > 1:
                value.record_stream(torch.accelerator.current_stream(value.device))


_WITHOUT_STREAMS = ("cpu", "meta", "mps")  # mps has one stream


def accelerator_devices(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """Returns the devices of tensors, without devices that have no streams."""
    devices = dict.fromkeys(t.device for t in tensors)
    return tuple(device for device in devices if device.type not in _WITHOUT_STREAMS)
