"""The store: states of an entry, and a write between the start and the finish of a refresh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.weights import store as module
from amp_fx.weights.cache_entry import computing_values
from amp_fx.weights.store import Store
from amp_fx.weights.watch import engine
from tests import needs
from tests.weights.specs import cast_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.weights.cache_entry import CacheEntry

pytestmark = needs.HOOK


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(8, 8)


@pytest.fixture
def own() -> Store:
    return Store()


def entry_of(own: Store, weight: torch.Tensor) -> CacheEntry:
    entry = own.entry(cast_spec(weight), (weight,), "a model")
    assert entry is not None
    return entry


def refresh(own: Store, weight: torch.Tensor) -> CacheEntry:
    entry = entry_of(own, weight)
    with own.locked(), computing_values():
        own.refresh([entry], [(weight,)])
    return entry


@pytest.mark.parametrize("is_watched_again", [False, True])
def test_the_state_of_weights_is_recorded_before_values_are_computed(
    is_watched_again: bool, own: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Note [Why a refresh starts before it computes] in ``weights.store``.

    Another graph may watch the weight again before the computation ends: then only the count of
    writes tells.
    """
    entry = entry_of(own, weight)
    recompute: Callable[..., Any] = module.Store._recompute

    def write_after(this: Store, *args: Any) -> Any:
        values = recompute(this, *args)
        weight.data.add_(1)
        if is_watched_again:
            assert engine().watch(weight)
        return values

    monkeypatch.setattr(module.Store, "_recompute", write_after)
    refresh(own, weight)
    assert entry.value is not None
    assert not entry.is_fresh()


def test_a_value_that_was_computed_elsewhere_is_stale_if_the_weight_was_written_since(
    own: Store, weight: torch.Tensor
) -> None:
    for is_written in (False, True):
        started = own.start((weight,))
        value = weight.bfloat16()
        if is_written:
            weight.add_(1)
        spec = cast_spec(weight, name=f"a weight, {is_written}")
        entry = own._new_entry(((id(weight),), is_written), spec, (weight,), "a model")
        own.adopt(entry, value, started, (0,))
        assert entry.is_fresh() != is_written


def test_the_lock_tells_reentry(own: Store) -> None:
    with own.locked() as is_outermost, own.locked() as is_inner:
        assert (is_outermost, is_inner) == (True, False)
        done: list[bool] = []
        own.run_when_unlocked(lambda: done.append(True))
        assert not done
    assert done == [True]


def test_a_weight_that_moves_before_its_value_is_computed(
    own: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another thread may move it: no value is taken for that of the memory it came back to."""
    first, second = weight.detach(), torch.randn(8, 8)
    moves = [second]
    recompute = own._recompute

    def moved(*args: Any) -> list[Any]:
        if moves:
            weight.data = moves.pop()
        return recompute(*args)

    monkeypatch.setattr(own, "_recompute", moved)
    refresh(own, weight)
    for memory in (first, second):
        weight.data = memory
        assert torch.equal(refresh(own, weight).value, memory.bfloat16())
