"""Has frozen graphs take the CPU for an accelerator: streams, events, answers that come later.

Kernels run at once, as on the CPU; what is emulated is what amp_fx asks of streams, and lists
are written where no storage sees it (``cuda_like``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from amp_fx import freezing
from amp_fx.weights import frozen_on_accelerator
from amp_fx.weights.element_sample import ElementSample
from amp_fx.weights.engine import engine
from amp_fx.weights.kept_copies import CACHE
from amp_fx.weights.stream_order import StreamOrder
from tests.weights.cuda_like import cuda_like
from tests.weights.test_device_sample import FakeDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

CPU = torch.device("cpu")


@dataclasses.dataclass(eq=False)
class Stream:
    """One that notes the events it waits for."""

    stream_id: int
    recorded: list[object] = dataclasses.field(default_factory=list)
    waited: list[object] = dataclasses.field(default_factory=list)

    def record_event(self) -> object:
        self.recorded.append(object())
        return self.recorded[-1]

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class Accelerator:
    """What a test sees and says of it.

    Attributes:
        streams: Two.
        current: The stream that calls come on.
        held: Identities of tensors whose memory is kept, with the streams it is kept for.
        is_capturing: Whether what is done now is recorded in a CUDA graph.
        device: Takes samples.
    """

    def __init__(self) -> None:
        self.streams = [Stream(0), Stream(1)]
        self.current = self.streams[0]
        self.held: set[tuple[int, int]] = set()
        self.is_capturing = False
        self.device = FakeDevice()


@contextlib.contextmanager
def accelerator_like(patch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """Where graphs on the CPU are frozen as those on an accelerator are."""
    pretended = Accelerator()

    def hold(tensor: torch.Tensor, stream: Stream) -> None:
        pretended.held.add((id(tensor), stream.stream_id))

    sample = functools.partial(ElementSample, pretended.device, has_kernel=False)
    patch.setattr(freezing, "ACCELERATORS", ("cpu",))
    patch.setattr(frozen_on_accelerator, "accelerator_devices", lambda _: (CPU,))
    patch.setattr(frozen_on_accelerator, "is_capturing", lambda _: pretended.is_capturing)
    patch.setattr(frozen_on_accelerator, "ElementSample", sample)
    patch.setattr(torch.accelerator, "current_stream", lambda _: pretended.current)
    patch.setattr(torch.Tensor, "record_stream", hold)
    patch.setattr(CACHE, "streams", StreamOrder())
    engine().watch_list_ops()
    with cuda_like():
        yield pretended
