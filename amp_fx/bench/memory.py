"""Peak memory of one contender: what it keeps, and what a call needs on top.

On an accelerator its allocator counts both. On a CPU resident memory says little, because
freed pages stay: there, what is kept is the sum over the storages of all tensors that came to
be with the contender, and what a call needs is the peak of what torch's CPU allocator gave out
during one call, as the profiler records it. Scratch space of libraries is in neither.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from typing import TYPE_CHECKING

import torch

from amp_fx.weights.store import storage_address_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.bench.contenders import Run

ON_CPU = "tensors alive after warm-up and the CPU allocator's peak in one call, by the profiler"
ON_ACCELERATOR = "the allocator's peak in one call, less what was allocated before the contender"


class MemoryMeter:
    """Measures one contender; make it before the contender is built."""

    def __init__(self, device: torch.device) -> None:
        """Takes what is allocated now for other people's."""
        self.device = device
        self._before = _kept_bytes(device)

    def peak(self, run: Run) -> int:
        """Bytes of a contender that was called before, at the peak of one more call."""
        if self.device.type == "cpu":
            kept = _kept_bytes(self.device) - self._before
            return kept + _cpu_peak(run)
        gc.collect()
        torch.accelerator.reset_peak_memory_stats(self.device)
        run()
        torch.accelerator.synchronize(self.device)
        return torch.accelerator.max_memory_allocated(self.device) - self._before


def how_measured(device: torch.device) -> str:
    """What the figures of this device are."""
    return ON_CPU if device.type == "cpu" else ON_ACCELERATOR


def _kept_bytes(device: torch.device) -> int:
    gc.collect()
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    alive = (obj for obj in gc.get_objects() if type(obj) in (torch.Tensor, torch.nn.Parameter))
    return sum({_place(t): _num_bytes(t) for t in alive if t.device.type == "cpu"}.values())


def _place(tensor: torch.Tensor) -> int:
    """What tells storages apart: views share one, and so do aliases."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    address: int = storage_address_of(tensor)
    return address


def _num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage; of an opaque one (packed for oneDNN) without its padding."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.itemsize
    return int(tensor.untyped_storage().nbytes())


def _cpu_peak(run: Run) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        _no_standard_error(),
        # Without acc_events torch 2.11 warns of cycles, of which this has one.
        torch.profiler.profile(
            activities=activities, profile_memory=True, acc_events=True
        ) as profile,
    ):
        run()
    result = profile.profiler.kineto_results
    events = [event for event in result.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


@contextlib.contextmanager
def _no_standard_error() -> Iterator[None]:
    """Drops the two lines that the profiler's library writes past Python for each use."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
