"""A small set of which all members are needed, found by asking of few sets whether they do.

The ranking comes first: sets are the beginnings of it, twice as long each time, and the first one
that does is then divided as QuickXplain does it (Junker, AAAI 2004): which of the later half is
needed if all of the former is there? That takes about 2 k log2(n / k) questions for k of n. If
more is never worse, the set is 1-minimal; whether it is gets asked in the end in any case.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

T = TypeVar("T")


class OutOfBudgetError(Exception):
    """No question is left."""


@dataclasses.dataclass(frozen=True)
class Minimized(Generic[T]):
    """What was found.

    Attributes:
        chosen: The set, in the order of the ranking; None if no set that was asked about does.
        is_minimal: Whether it was asked of each member, and none can be left out.
        is_spent: Whether the questions were used up before.
    """

    chosen: tuple[T, ...] | None
    is_minimal: bool
    is_spent: bool = False


class Minimizer(Generic[T]):
    """Finds a small set that does, of members that are ranked with the most promising first.

    It begins with the first ``first`` of them. ``rivals`` names members that may stand for two
    others together. ``does`` is asked once for each set, at most ``budget`` times.
    """

    def __init__(
        self,
        ranked: Sequence[T],
        does: Callable[[tuple[T, ...]], bool],
        budget: int,
        first: int = 1,
        rivals: Callable[[T, T], Iterable[T]] = lambda _a, _b: (),
    ) -> None:
        self._ranked = list(ranked)
        self._rank = {member: place for place, member in enumerate(self._ranked)}
        self._does = does
        self._budget = budget
        self._first = max(1, first)
        self._rivals = rivals
        self._known: dict[frozenset[T], bool] = {}
        self._best: tuple[T, ...] | None = None

    def run(self) -> Minimized[T]:
        """Finds it."""
        try:
            prefix = self._shortest_prefix()
            if prefix is None:
                return Minimized(None, is_minimal=False)
            chosen = self._divide([], prefix, is_changed=False) if prefix else []
            if not self._asks(chosen):
                chosen = prefix  # more was worse somewhere
            chosen = self._merged(self._shrunk(chosen))
            return Minimized(self._sorted(self._shrunk(chosen)), is_minimal=True)
        except OutOfBudgetError:
            return Minimized(self._best, is_minimal=False, is_spent=True)

    def _asks(self, members: Iterable[T]) -> bool:
        key = frozenset(members)
        if key not in self._known:
            if len(self._known) >= self._budget:
                raise OutOfBudgetError
            chosen = self._sorted(key)
            self._known[key] = self._does(chosen)
            is_smaller = self._best is None or len(chosen) < len(self._best)
            if self._known[key] and is_smaller:
                self._best = chosen
        return self._known[key]

    def _sorted(self, members: Iterable[T]) -> tuple[T, ...]:
        return tuple(sorted(members, key=self._rank.__getitem__))

    def _shortest_prefix(self) -> list[T] | None:
        length = 0
        while True:
            if self._asks(self._ranked[:length]):
                return self._ranked[:length]
            if length >= len(self._ranked):
                return None
            length = max(self._first, 2 * length)

    def _divide(self, given: list[T], members: list[T], *, is_changed: bool) -> list[T]:
        """What of ``members`` is needed besides ``given``."""
        if is_changed and self._asks(given):
            return []
        if len(members) == 1:
            return members
        half = (len(members) + 1) // 2
        former, latter = members[:half], members[half:]
        second = self._divide(given + former, latter, is_changed=True)
        first = self._divide(given + second, former, is_changed=bool(second))
        return first + second

    def _shrunk(self, chosen: list[T]) -> list[T]:
        """Without what can be left out, the least promising first.

        What is needed next to others need not be without them: until nothing changes any more.
        """
        before = len(chosen)
        for member in reversed(self._sorted(chosen)):
            fewer = [other for other in chosen if other != member]
            if self._asks(fewer):
                chosen = fewer
        return chosen if len(chosen) == before else self._shrunk(chosen)

    def _merged(self, chosen: list[T]) -> list[T]:
        """With one member in the place of two, where that does."""
        for index, one in enumerate(chosen):
            for other in chosen[index + 1 :]:
                rest = [m for m in chosen if m not in (one, other)]
                for rival in self._rivals(one, other):
                    if rival not in chosen and self._asks([*rest, rival]):
                        return self._merged([*rest, rival])
        return chosen
