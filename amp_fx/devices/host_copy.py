"""Copies small tensors from an accelerator to the host; neither waits for the other.

The host fills its memory with ones, every bit, before each copy. No element that arrives looks so:
the memory itself says which elements have arrived, in whatever order they do.

The host asks no event. While another thread captures a CUDA graph in the mode ``"global"``, the
default, ``cudaEventQuery`` fails and ends that capture; ``is_current_stream_capturing`` knows only
of the current stream. Allocating pinned memory is such a call, too, so memory is used
again.
"""

from __future__ import annotations

import torch

_WORDS = {1: torch.int8, 4: torch.int32}


class HostCopy:
    """Memory of the host, and the copy that is on its way there, if any."""

    def __init__(self) -> None:
        self._room: torch.Tensor | None = None
        self._under_way: torch.Tensor | None = None

    @property
    def is_under_way(self) -> bool:
        """True if a copy was started of which nobody has taken the result."""
        return self._under_way is not None

    def start(self, source: torch.Tensor, *, room: int = 0) -> None:
        """Queues a copy on the current stream, which must not be capturing; none may be under way.

        Args:
            source: A dense tensor of truth values, or of float32 without the NaN of all ones.
            room: How many elements a later one may have.
        """
        words, count = _WORDS[source.element_size()], source.numel()
        if self._room is None or self._room.numel() < count:
            with torch.inference_mode(mode=False):
                self._room = torch.empty(
                    max(room, count), dtype=words, device="cpu", pin_memory=not source.is_cpu
                )
        target = self._room[:count].fill_(-1).view(source.dtype)
        queue(target, source.reshape(-1))
        self._under_way = target

    def take(self) -> torch.Tensor | None:
        """Returns the elements, in one dimension, once all have arrived; None before."""
        if self._under_way is None:
            return None
        words = self._under_way.view(_WORDS[self._under_way.element_size()])
        if (words == -1).any():
            return None
        found = self._under_way.clone()  # the next copy may start as soon as this one is taken
        self._under_way = None
        return found


def queue(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies behind what is queued, without waiting."""
    target.copy_(source, non_blocking=True)
