"""The compiled part that watches weights (``native/watch.cpp``)."""

from __future__ import annotations

from typing import Any

from amp_fx import native


def engine() -> Any:
    """The module with ``Kept``, ``Look`` and the functions on tensors; None if there is none."""
    return native.load()


def has_hook() -> bool:
    """Whether any thread may watch a storage at any time: since torch 2.13, if it can be built."""
    return engine() is not None and bool(engine().has_hook)
