"""Finds a small set of members that meets a condition, with few evaluations of the condition."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

T = TypeVar("T")


class OutOfBudgetError(Exception):
    """The budget of evaluations is spent."""


@dataclasses.dataclass(frozen=True)
class Minimized(Generic[T]):
    """The result of a minimization.

    Attributes:
        chosen: The set, in the order of the ranking; None if no evaluated set meets the condition.
        is_minimal: True if each member was omitted once, and no such set meets the condition.
        is_spent: True if the budget was spent before.
    """

    chosen: tuple[T, ...] | None
    is_minimal: bool
    is_spent: bool = False


class Minimizer(Generic[T]):
    """Finds a small set of ranked members.

    First it doubles a prefix of the ranking until that meets the condition. Then it divides the
    prefix as QuickXplain does (Junker, AAAI 2004), which takes about 2 k log2(n / k) evaluations
    for k of n members. The result is 1-minimal if supersets of a sufficient set are sufficient;
    whether it is, is evaluated at the end in any case.

    Args:
        ranked: The members, the most promising first.
        is_enough: The condition; each set is evaluated once.
        budget: The largest number of evaluations.
        first: The length of the first prefix after the empty one.
    """

    def __init__(
        self,
        ranked: Sequence[T],
        is_enough: Callable[[tuple[T, ...]], bool],
        budget: int,
        first: int = 1,
    ) -> None:
        self._ranked = list(ranked)
        self._rank = {member: place for place, member in enumerate(self._ranked)}
        self._condition = is_enough
        self._budget = budget
        self._first = max(1, first)
        self._known: dict[frozenset[T], bool] = {}

    def run(self) -> Minimized[T]:
        """Returns the set."""
        try:
            prefix = self._shortest_prefix()
            if prefix is None:
                return Minimized(None, is_minimal=False)
            chosen = self._needed([], prefix, is_changed=False) if prefix else []
            if not self._is_enough(chosen):
                chosen = prefix  # a superset of a sufficient set was not sufficient
            return Minimized(self._sorted(self._shrunk(chosen)), is_minimal=True)
        except OutOfBudgetError:
            sufficient = [self._sorted(key) for key, is_enough in self._known.items() if is_enough]
            return Minimized(
                min(sufficient, key=len, default=None), is_minimal=False, is_spent=True
            )

    def _is_enough(self, members: Iterable[T]) -> bool:
        key = frozenset(members)
        if key not in self._known:
            if len(self._known) >= self._budget:
                raise OutOfBudgetError
            self._known[key] = self._condition(self._sorted(key))
        return self._known[key]

    def _sorted(self, members: Iterable[T]) -> tuple[T, ...]:
        return tuple(sorted(members, key=self._rank.__getitem__))

    def _shortest_prefix(self) -> list[T] | None:
        length = 0
        while not self._is_enough(self._ranked[:length]):
            if length >= len(self._ranked):
                return None
            length = max(self._first, 2 * length)
        return self._ranked[:length]

    def _needed(self, given: list[T], members: list[T], *, is_changed: bool) -> list[T]:
        """Returns a minimal subset of ``members`` that is sufficient together with ``given``."""
        if is_changed and self._is_enough(given):
            return []
        if len(members) == 1:
            return members
        half = (len(members) + 1) // 2
        former, latter = members[:half], members[half:]
        second = self._needed(given + former, latter, is_changed=True)
        return self._needed(given + second, former, is_changed=bool(second)) + second

    def _shrunk(self, chosen: list[T]) -> list[T]:
        """Omits members, the least promising first, until none can be omitted."""
        before = len(chosen)
        for member in reversed(self._sorted(chosen)):
            fewer = [other for other in chosen if other != member]
            if self._is_enough(fewer):
                chosen = fewer
        return chosen if len(chosen) == before else self._shrunk(chosen)
