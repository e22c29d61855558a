"""Counts of rewrites over all graphs of this process."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from amp_fx.passes.base import PassReport

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def record_graph(reports: Iterable[PassReport]) -> None:
    """Adds the counts of the passes on one graph."""
    with _lock:
        _counts["graphs"] += 1
        for report in reports:
            _counts.update(report.counts)


def record(counts: Mapping[str, int]) -> None:
    """Adds the counts of rewrites of a graph of AOTAutograd."""
    with _lock:
        _counts.update(counts)


def snapshot() -> Counter[str]:
    """Returns the counts since the start or ``reset``: graphs, casts_inserted, ..."""
    with _lock:
        return Counter(_counts)


def reset() -> None:
    """Sets all counts to zero."""
    with _lock:
        _counts.clear()
