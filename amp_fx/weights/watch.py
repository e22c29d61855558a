"""The C++ extension that watches weights (``csrc/watch.cpp``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_fx import csrc

if TYPE_CHECKING:
    import torch


def engine() -> Any:
    """Returns the extension module; None if it cannot be built."""
    return csrc.load()


def is_available() -> bool:
    """Returns True if values can be cached, because the extension is built."""
    return engine() is not None


def watch(source: torch.Tensor) -> bool:
    """Watches a tensor for writes; returns False if that is impossible."""
    return bool(engine().watch(source))
