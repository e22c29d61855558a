"""A lower bound of the loss scale that needs no synchronization with the device."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_fx.devices.host_copy import HostCopy

# A larger bound stays above 1 for ten halvings, so no copy is needed yet.
_COPY_BELOW = 1024.0
# Copies from MPS to the host may synchronize.
_DEVICES_WITH_ASYNC_COPIES = ("cuda", "xpu")


class ScaleBound:
    """Lower bound of the scale.

    On the CPU, the bound is the scale. On other devices, it assumes that every update backed off,
    until an asynchronous copy of the scale arrives.

    Args:
        value: The initial scale; 0 if only the device knows it.

    Attributes:
        value: The bound.
    """

    def __init__(self, value: float) -> None:
        self.value = value
        self._copy = HostCopy()
        self._backoff = 1.0  # product of the backoff factors since the latest copy was started

    def follow(self, scale: Tensor, backoff_factor: float, min_scale: float) -> None:
        """Updates the bound after an update of the scale; does not wait for the device."""
        if scale.is_cpu:
            self.value = scale.item()
            return
        self._backoff *= backoff_factor
        self.value = max(self.value * backoff_factor, min(self.value, min_scale))
        if (copied := self._copy.take()) is not None:
            self.value = max(self.value, copied.item() * self._backoff)
        if self.value < _COPY_BELOW and not self._copy.is_under_way and _can_copy(scale):
            self._copy.start(scale)
            self._backoff = 1.0


def _can_copy(scale: Tensor) -> bool:
    """Returns True if a copy to the host neither synchronizes nor breaks a CUDA graph capture."""
    if scale.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return scale.device.type in _DEVICES_WITH_ASYNC_COPIES
