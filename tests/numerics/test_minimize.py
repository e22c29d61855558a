"""Small sets, and how many questions they take."""

from __future__ import annotations

import random
import statistics
from typing import Any

import hypothesis
from hypothesis import strategies as st

from amp_fx.numerics.minimizer import Minimized, Minimizer


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(st.integers(1, 40), st.data())
def test_exactly_what_is_needed_is_found(size: int, data: st.DataObject) -> None:
    needed = data.draw(st.sets(st.integers(0, size - 1), max_size=6))
    asked: list[tuple[int, ...]] = []

    def does(members: tuple[int, ...]) -> bool:
        asked.append(members)
        return needed <= set(members)

    found = Minimizer(range(size), does, 10_000).run()
    assert found == Minimized(tuple(sorted(needed)), is_minimal=True)
    assert len(asked) == len(set(asked)), "no question twice"


def test_whatever_the_answers_the_set_does_and_nothing_can_be_left_out() -> None:
    """Covers sets that are not monotone; one sweep is not enough in one of 200."""
    for rng in map(random.Random, range(4000)):
        size = rng.randint(1, 12)
        answers: dict[frozenset[int], bool] = {frozenset(range(size)): True}

        def does(members: tuple[int, ...], answers: Any = answers, rng: Any = rng) -> bool:
            found: bool = answers.setdefault(frozenset(members), rng.random() < 0.3)
            return found

        found = Minimizer(range(size), does, 10_000).run()
        assert found.is_minimal
        assert found.chosen is not None
        chosen = set(found.chosen)
        assert answers[frozenset(chosen)]
        assert not any(answers[frozenset(chosen - {member})] for member in chosen)


def test_out_of_questions_the_smallest_set_so_far_is_given() -> None:
    needed = {3, 17, 30}
    found = Minimizer(range(40), lambda m: needed <= set(m), budget=9).run()
    assert (found.is_minimal, found.is_spent) == (False, True)
    assert found.chosen is not None
    assert needed < set(found.chosen)
    assert Minimizer(range(40), lambda _: False, budget=100).run().chosen is None
    assert Minimizer(range(40), lambda _: False, budget=3).run() == Minimized(
        None, is_minimal=False, is_spent=True
    )


def test_a_good_ranking_saves_questions() -> None:
    """Three of 50, somewhere among the first twelve of the ranking; 40 draws."""
    rng = random.Random(0)
    counts = []
    for _ in range(40):
        needed = set(rng.sample(range(50), 3))
        first = [*needed, *rng.sample(sorted(set(range(50)) - needed), 9)]
        rng.shuffle(first)
        ranked = [*first, *sorted(set(range(50)) - set(first))]
        asked: set[tuple[int, ...]] = set()

        def does(members: tuple[int, ...], asked: Any = asked, needed: Any = needed) -> bool:
            asked.add(members)
            return needed <= {*members}  # type: ignore[no-any-return]

        Minimizer(ranked, does, 10_000, first=3).run()
        counts.append(len(asked))
    assert statistics.median(counts) <= 20
    assert max(counts) <= 25
