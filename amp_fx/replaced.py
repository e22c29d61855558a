"""Puts other values in the place of attributes, such as functions of torch, for a while."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Gives attributes other values; one thread at a time, because all threads see them.

    Args:
        *attributes: Modules, classes or objects, each with a name and the value it gets.
    """
    with _lock:
        before = [(place, name, vars(place).get(name, _ABSENT)) for place, name, _ in attributes]
        for place, name, value in attributes:
            setattr(place, name, value)
        try:
            yield
        finally:
            for place, name, value in before:
                if value is _ABSENT:
                    delattr(place, name)
                else:
                    setattr(place, name, value)


_ABSENT = object()
_lock = threading.RLock()
