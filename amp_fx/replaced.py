"""Temporary replacement of attributes, such as functions of torch."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Context in which attributes have other values, for one thread at a time.

    Args:
        *attributes: Owners (modules, classes or objects) with the names and new values of their
            attributes. All threads see the new values.
    """
    with _lock:
        before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in attributes]
        for owner, name, value in attributes:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                if value is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)


_ABSENT = object()
_lock = threading.RLock()
