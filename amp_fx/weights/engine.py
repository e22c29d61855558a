"""The compiled part that watches weights (``csrc/watch.cpp``)."""

from __future__ import annotations

from typing import Any

from amp_fx import csrc


def engine() -> Any:
    """The module with ``Kept``, ``Look`` and the functions on tensors; None if there is none."""
    return csrc.load()


def has_hook() -> bool:
    """Whether any thread may watch a storage at any time: since torch 2.13, if it can be built."""
    return engine() is not None and bool(engine().has_hook)
