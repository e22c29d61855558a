"""A lower bound of the loss scale that the host knows without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_fx.devices.host_copy import HostCopy

# Above this the bound stays above 1 for ten halvings, so a copy can start later.
_COPY_BELOW = 1024.0
# MPS has no copy to the host that is known not to wait.
_DEVICES_WITH_ASYNC_COPIES = ("cuda", "xpu")


class ScaleBound:
    """Lower bound of the scale.

    On the CPU it is the scale. On a device every update may have backed off, until an asynchronous
    copy of the scale has arrived.

    Attributes:
        value: The scale is at least this.
    """

    def __init__(self, value: float) -> None:
        """Starts from a scale that was just set; 0 if only the device knows it."""
        self.value = value
        self._copy = HostCopy()
        self._shrunk = 1.0  # by what the scale may have shrunk since the copy was started

    def follow(self, scale: Tensor, backoff_factor: float, min_scale: float) -> None:
        """Takes an update of the scale into account; does not wait for the device."""
        if scale.is_cpu:
            self.value = scale.item()
            return
        self._shrunk *= backoff_factor
        self.value = max(self.value * backoff_factor, min(self.value, min_scale))
        if (arrived := self._copy.take()) is not None:
            self.value = max(self.value, arrived.item() * self._shrunk)
        if self.value < _COPY_BELOW and not self._copy.is_under_way and _can_copy(scale):
            self._copy.start(scale)
            self._shrunk = 1.0


def _can_copy(scale: Tensor) -> bool:
    """Returns True if a copy to the host neither waits nor ends the capture of a CUDA graph."""
    if scale.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return scale.device.type in _DEVICES_WITH_ASYNC_COPIES
