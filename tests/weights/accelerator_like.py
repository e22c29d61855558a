"""Makes amp_fx take the CPU for an accelerator: streams and events.

Kernels run at once, as on the CPU. What is emulated is what amp_fx asks of streams, and ops that
write lists of tensors, whose writes no storage sees (``cuda_like``).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.backend import lower
from amp_fx.weights import call, keep
from amp_fx.weights.store import STORE
from amp_fx.weights.streams import StreamOrder
from amp_fx.weights.watch import engine
from tests.weights.cuda_like import cuda_like

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

CPU = torch.device("cpu")


class Event:
    """Event without ``query``, which would end captures in other threads."""


@dataclasses.dataclass(eq=False)
class Stream:
    """One that notes its events, and those that it waits for."""

    stream_id: int
    recorded: list[Event] = dataclasses.field(default_factory=list)
    waited: list[Event] = dataclasses.field(default_factory=list)

    def record_event(self) -> Event:
        """Records an event."""
        self.recorded.append(Event())
        return self.recorded[-1]

    def wait_event(self, event: Event) -> None:
        """Waits for one, perhaps of another stream."""
        self.waited.append(event)


class Accelerator:
    """State of the pretended accelerator, which tests read and set.

    Attributes:
        streams: Two streams.
        current: The current stream of calls.
        held: Addresses of storages that were recorded on a stream, with the stream's id.
        is_capturing: True if a CUDA graph is being captured.
    """

    def __init__(self) -> None:
        self.streams = [Stream(0), Stream(1)]
        self.current = self.streams[0]
        self.held: set[tuple[int, int]] = set()
        self.is_capturing = False

    def is_held(self, tensor: torch.Tensor, stream: Stream) -> bool:
        """Returns True if the memory of a tensor is held until a stream has read it."""
        return (address_of(tensor), stream.stream_id) in self.held


def address_of(tensor: torch.Tensor) -> int:
    """Address of a storage, without asking for a pointer; of the tensor if it is packed."""
    if tensor.is_mkldnn:
        return id(tensor)
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return address


class _WithoutHostSamples:
    """The engine, for weights whose elements the host cannot read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(engine(), name)

    def GraphCache(self, sources: Any, passed: Any, num_constants: int, _: bool) -> Any:  # noqa: N802
        """Returns a ``GraphCache`` that does not sample."""
        return engine().GraphCache(sources, passed, num_constants, False)


@contextlib.contextmanager
def accelerator_like(patch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """Makes graphs on the CPU cache values as graphs on an accelerator do."""
    pretended = Accelerator()

    def hold(tensor: torch.Tensor, stream: Stream) -> None:
        pretended.held.add((address_of(tensor), stream.stream_id))

    patch.setattr(lower, "ACCELERATORS", ("cpu",))
    patch.setattr(call, "engine", _WithoutHostSamples)
    for module in (call, keep):
        patch.setattr(module, "accelerator_devices", lambda _: (CPU,))
    patch.setattr(call, "is_capturing", lambda _: pretended.is_capturing)
    patch.setattr(torch.accelerator, "current_stream", lambda _: pretended.current)
    patch.setattr(torch.Tensor, "record_stream", hold)
    patch.setattr(STORE, "streams", StreamOrder())
    engine().watch_list_ops()
    with cuda_like():
        yield pretended
