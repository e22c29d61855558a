"""Counts of rewrites over all graphs of this process."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def record(*counts: Mapping[str, int]) -> None:
    """Adds the counts of rewrites of a graph."""
    with _lock:
        for each in counts:
            _counts.update(each)


def snapshot() -> Counter[str]:
    """Returns the counts since the start or ``reset``: graphs, casts_inserted, ..."""
    with _lock:
        return Counter(_counts)


def reset() -> None:
    """Sets all counts to zero."""
    with _lock:
        _counts.clear()
