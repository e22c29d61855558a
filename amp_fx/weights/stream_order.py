"""Makes every stream wait for refreshes of kept copies that another stream made.

A copy is refreshed on the stream of the call that found it stale; a call on another
stream may use it without any synchronisation of its own, so that the cache has to order
the two. On the CPU there is nothing to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class StreamOrder:
    """The streams that calls came on, and the last refresh on each, by device."""

    def __init__(self) -> None:
        self._events: dict[torch.device, dict[int, torch.Event]] = {}
        self._streams: dict[torch.device, set[int]] = {}

    def record(self, devices: Iterable[torch.device]) -> None:
        """Notes that copies on these devices were just refreshed on the current streams."""
        for device in devices:
            stream = torch.accelerator.current_stream(device)
            self._events.setdefault(device, {})[stream.stream_id] = stream.record_event()

    def note(self, devices: Iterable[torch.device]) -> None:
        """Notes that a call came on the current streams: before it looks for what is fresh."""
        for device in devices:
            stream = torch.accelerator.current_stream(device)
            self._streams.setdefault(device, set()).add(stream.stream_id)

    def wait(self, devices: Iterable[torch.device]) -> None:
        """Lets the current streams wait for what was refreshed on others."""
        for device in devices:
            stream = torch.accelerator.current_stream(device)
            for stream_id, event in list(self._events.get(device, {}).items()):
                if stream_id != stream.stream_id:
                    stream.wait_event(event)

    def are_several(self, devices: Iterable[torch.device] | None = None) -> bool:
        """Whether calls came on more than one stream: kernels of another may still read copies.

        Args:
            devices: Those that are asked about; None for all.
        """
        known = self._streams if devices is None else devices
        return any(len(self._streams.get(device, ())) > 1 for device in known)

    def hold(self, lows: Sequence[torch.Tensor]) -> None:
        """Keeps the memory of copies until the current streams have read it."""
        for low in lows:
            if len(self._streams.get(low.device, ())) > 1:
                low.record_stream(torch.accelerator.current_stream(low.device))


_WITHOUT_STREAMS = ("cpu", "meta", "mps")  # mps runs everything on one


def accelerator_devices(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """The devices of tensors that have streams; none for the CPU."""
    found = dict.fromkeys(t.device for t in tensors if t.device.type not in _WITHOUT_STREAMS)
    return tuple(found)
