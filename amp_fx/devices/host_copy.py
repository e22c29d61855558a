"""Asynchronous copies of small tensors from an accelerator to the host.

The host sets all bits of its memory before each copy. No valid element has all bits set, so the
host can see which elements have arrived.

Events are not used: while another thread captures a CUDA graph in the default mode ``"global"``,
``cudaEventQuery`` fails and invalidates that capture, and ``is_current_stream_capturing`` only
checks the current stream. The same holds for allocations of pinned memory, so memory is reused.
"""

from __future__ import annotations

import torch

_WORDS = {1: torch.int8, 4: torch.int32}


class HostCopy:
    """Host memory, and the pending copy to it, if any."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._pending: torch.Tensor | None = None

    @property
    def is_under_way(self) -> bool:
        """True if a copy was started and its result was not returned yet."""
        return self._pending is not None

    def start(self, source: torch.Tensor, *, room: int = 0) -> None:
        """Queues a copy on the current stream, which must not be capturing a CUDA graph.

        No other copy may be pending.

        Args:
            source: A dense tensor of booleans, or of float32 without the NaN that has all bits set.
            room: Maximum number of elements of later copies.
        """
        words, count = _WORDS[source.element_size()], source.numel()
        if self._buffer is None or self._buffer.numel() < count:
            with torch.inference_mode(mode=False):
                self._buffer = torch.empty(
                    max(room, count), dtype=words, device="cpu", pin_memory=not source.is_cpu
                )
        target = self._buffer[:count].fill_(-1).view(source.dtype)
        queue(target, source.reshape(-1))
        self._pending = target

    def take(self) -> torch.Tensor | None:
        """Returns a one-dimensional tensor once all elements have arrived; None before."""
        if self._pending is None:
            return None
        words = self._pending.view(_WORDS[self._pending.element_size()])
        if (words == -1).any():
            return None
        result = self._pending.clone()  # the next copy overwrites the buffer
        self._pending = None
        return result


def queue(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queues a copy on the current stream without waiting."""
    target.copy_(source, non_blocking=True)
