"""The C++ extension that watches weights (``csrc/watch.cpp``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from amp_fx import csrc

if TYPE_CHECKING:
    import torch

    from amp_fx.csrc.engine import Engine


def engine() -> Engine:
    """Returns the extension module; call it only if ``is_available``."""
    return cast("Engine", csrc.load())


def is_available() -> bool:
    """Returns True if values can be cached, because the extension is built."""
    return csrc.load() is not None


def watch(source: torch.Tensor) -> bool:
    """Watches a tensor for writes; returns False if that is impossible."""
    return bool(engine().watch(source))
