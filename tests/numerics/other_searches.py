"""Searches of other tools for ops that need float32, to count their trials.

They follow the descriptions of the methods: segments of onnxconverter-common's
``auto_mixed_precision``, the bisection of prefixes of polygraphy's ``debug precision``, and
Zeller's ddmin, which Precimonious builds on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


def segments(members: Sequence[T], does: Callable[[list[T]], bool]) -> list[T]:
    """Grows what is low by the largest segment that may be; halves segments that may not."""
    low: set[T] = set()
    pending = [list(members)]
    while pending:
        segment = max(pending, key=len)
        pending.remove(segment)
        if does([m for m in members if m not in low and m not in segment]):
            low |= set(segment)
        elif len(segment) > 1:
            half = len(segment) // 2
            pending += [segment[:half], segment[half:]]
    return [m for m in members if m not in low]


def bisection(members: Sequence[T], does: Callable[[list[T]], bool]) -> list[T]:
    """Returns the shortest beginning of the program that does in float32."""
    low, high = 0, len(members)
    while low < high:
        middle = (low + high) // 2
        if does(list(members[:middle])):
            high = middle
        else:
            low = middle + 1
    return list(members[:high])


def ddmin(members: Sequence[T], does: Callable[[list[T]], bool]) -> list[T]:
    """Leaves out ever smaller parts."""
    found, parts = list(members), 2
    while len(found) >= 2:
        size = -(-len(found) // parts)
        chunks = [found[i : i + size] for i in range(0, len(found), size)]
        for chunk in chunks:
            rest = [m for m in found if m not in chunk]
            if does(chunk):
                found, parts = chunk, 2
                break
            if len(chunks) > 2 and does(rest):
                found, parts = rest, max(parts - 1, 2)
                break
        else:
            if parts >= len(found):
                break
            parts = min(2 * parts, len(found))
    return found
