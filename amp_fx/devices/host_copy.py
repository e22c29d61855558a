"""Asynchronous copy of a number from an accelerator to the host.

The host sets all bits of its memory before each copy. No valid number has all bits set, so the host
can see whether the number has arrived.

Events are not used: while another thread captures a CUDA graph in the default mode ``"global"``,
``cudaEventQuery`` fails and invalidates that capture, and ``is_current_stream_capturing`` only
checks the current stream. The same holds for allocations of pinned memory, so memory is reused.
"""

from __future__ import annotations

import torch


class HostCopy:
    """Host memory for a float32 number, and the pending copy to it, if any."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._pending: torch.Tensor | None = None

    @property
    def is_under_way(self) -> bool:
        """True if a copy was started and its result was not returned yet."""
        return self._pending is not None

    def start(self, source: torch.Tensor) -> None:
        """Queues a copy on the current stream, which must not be capturing a CUDA graph.

        No other copy may be pending.

        Args:
            source: A float32 tensor with one element, which is not the NaN that has all bits set.
        """
        if self._buffer is None:
            with torch.inference_mode(mode=False):
                self._buffer = torch.empty(
                    1, dtype=torch.int32, device="cpu", pin_memory=not source.is_cpu
                )
        self._pending = self._buffer.fill_(-1).view(torch.float32)
        self._pending.copy_(source.reshape(-1), non_blocking=True)

    def take(self) -> torch.Tensor | None:
        """Returns a tensor with the number once it has arrived; None before."""
        if self._pending is None or self._pending.view(torch.int32) == -1:
            return None
        result = self._pending.clone()  # the next copy overwrites the buffer
        self._pending = None
        return result
