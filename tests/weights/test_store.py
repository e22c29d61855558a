"""The store: states of an entry, and a write between the start and the finish of a refresh."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.weights import store as module
from amp_fx.weights.cache_entry import computing_values
from amp_fx.weights.store import Store
from tests import needs
from tests.weights.specs import cast_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.weights.cache_entry import CacheEntry

pytestmark = needs.HOOK


class Alive:
    """Placeholder of a compiled graph that uses an entry."""

    def evict(self) -> None:
        """Counts nothing."""


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


def test_an_entry_is_empty_then_fresh_then_stale_then_fresh(
    own: Store, weight: torch.Tensor
) -> None:
    entry = entry_of(own, weight)
    assert not entry.is_fresh()
    assert refresh(own, weight) is entry
    assert entry.is_fresh()
    assert torch.equal(entry.value, weight.bfloat16())
    with torch.no_grad():
        weight.add_(1)
    assert not entry.is_fresh()
    refresh(own, weight)
    assert entry.is_fresh()
    assert torch.equal(entry.value, weight.bfloat16())


def test_equal_specs_of_one_weight_share_an_entry(own: Store, weight: torch.Tensor) -> None:
    first = entry_of(own, weight)
    assert entry_of(own, weight) is first
    assert entry_of(own, weight.clone()) is not first
    assert own.entry(cast_spec(weight, torch.float16), (weight,), "other") is not first


def test_a_refresh_reuses_memory_that_nothing_holds(own: Store, weight: torch.Tensor) -> None:
    entry = refresh(own, weight)
    address = entry.value.data_ptr()
    weight.mul_(2)
    refresh(own, weight)
    assert entry.value.data_ptr() == address
    held = entry.value
    before = held.clone()
    weight.mul_(2)
    refresh(own, weight)
    assert entry.value.data_ptr() != held.data_ptr()
    assert torch.equal(held, before)


def pausing(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Makes refreshes wait after they have computed values, before they finish."""
    computed, go_on = threading.Event(), threading.Event()
    recompute: Callable[..., Any] = module.Store._recompute

    def wait(this: Store, *args: Any) -> Any:
        values = recompute(this, *args)
        computed.set()
        assert go_on.wait(30)
        return values

    monkeypatch.setattr(module.Store, "_recompute", wait)
    return computed, go_on


def test_a_write_between_start_and_finish_leaves_the_value_stale(
    own: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this case, the time of another thread's write is a second protection."""
    entry = entry_of(own, weight)
    computed, go_on = pausing(monkeypatch)
    thread = threading.Thread(target=refresh, args=(own, weight))
    thread.start()
    assert computed.wait(30)
    with torch.no_grad():
        weight.add_(1)
    go_on.set()
    thread.join()
    assert entry.value is not None
    assert not entry.is_fresh()
    monkeypatch.undo()
    refresh(own, weight)
    assert torch.equal(entry.value, weight.bfloat16())


def test_the_state_of_weights_is_recorded_before_values_are_computed(
    own: Store, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Note [Why a refresh starts before it computes] in ``weights.store``."""
    entry = entry_of(own, weight)
    recompute: Callable[..., Any] = module.Store._recompute

    def write_after(this: Store, *args: Any) -> Any:
        values = recompute(this, *args)
        weight.add_(1)
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


def test_an_entry_goes_with_its_weight(own: Store) -> None:
    weight = torch.randn(8, 8)
    entry = refresh(own, weight)
    assert own.num_bytes == 128
    del weight
    assert entry.weights() is None
    assert not own.entries
    assert own.num_bytes == 0


def test_the_limit_drops_values_without_hits(own: Store, weight: torch.Tensor) -> None:
    other = torch.randn(8, 8)
    refresh(own, weight)
    own.limit = 128
    entry = refresh(own, other)
    own.enforce_limit([entry])
    assert list(own.entries.values()) == [entry]


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
