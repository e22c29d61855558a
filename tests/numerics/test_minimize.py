"""Small sets, and how many questions they take."""

from __future__ import annotations

import random
import statistics

import hypothesis
from hypothesis import strategies as st

from amp_fx.numerics.minimizer import Minimized, Minimizer
from tests.numerics.other_searches import bisection, ddmin, segments


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


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_whatever_the_answers_the_set_does_and_nothing_can_be_left_out(
    size: int, rng: random.Random
) -> None:
    check_minimal(size, rng)


def test_what_becomes_needless_late_is_left_out_too() -> None:
    """One sweep over the members is not enough in one of 200."""
    for seed in range(4000):
        rng = random.Random(seed)
        check_minimal(rng.randint(1, 12), rng)


def check_minimal(size: int, rng: random.Random) -> None:
    """Sets that do need not be monotone; the whole one does here."""
    answers: dict[frozenset[int], bool] = {frozenset(range(size)): True}

    def does(members: tuple[int, ...]) -> bool:
        return answers.setdefault(frozenset(members), rng.random() < 0.3)

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


def questions(size: int, needed: set[int], ranked: list[int]) -> dict[str, int]:
    """Returns the number of trials that each search takes until it ends."""
    counts: dict[str, int] = {}

    def counting(name: str) -> object:
        known: dict[frozenset[int], bool] = {}

        def does(members: object) -> bool:
            key = frozenset(members)  # type: ignore[call-overload]
            known.setdefault(key, needed <= key)
            counts[name] = len(known)
            return known[key]

        return does

    Minimizer(ranked, counting("ours"), 10_000, first=len(needed)).run()  # type: ignore[arg-type]
    assert set(segments(range(size), counting("segments"))) == needed  # type: ignore[arg-type]
    assert set(bisection(range(size), counting("bisection"))) >= needed  # type: ignore[arg-type]
    assert set(ddmin(range(size), counting("ddmin"))) == needed  # type: ignore[arg-type]
    return counts


def test_a_good_ranking_saves_questions() -> None:
    """Three of 50, somewhere among the first twelve of the ranking; medians of 40 draws."""
    rng = random.Random(0)
    draws = []
    for _ in range(40):
        needed = set(rng.sample(range(50), 3))
        first = [*needed, *rng.sample(sorted(set(range(50)) - needed), 9)]
        rng.shuffle(first)
        ranked = [*first, *sorted(set(range(50)) - set(first))]
        draws.append(questions(50, needed, ranked))
    medians = {name: statistics.median(d[name] for d in draws) for name in draws[0]}
    assert medians["ours"] <= 20
    assert medians["ours"] < medians["segments"] < medians["ddmin"]
    assert max(d["ours"] for d in draws) <= 25
