"""One low-precision copy per (weight, dtype, memory format), for the whole process.

A copy is made again, together with all other stale ones of a call, before the first call
after a write to its weight; how writes are noticed is told in ``amp_fx.weights.write_signals``.
It is written in place, so that it keeps its address, unless another call or a backward may
still read it: those keep the old one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.regions.state import no_autocast
from amp_fx.weights.engine import engine
from amp_fx.weights.stream_order import StreamOrder
from amp_fx.weights.tensor_swaps import before_swaps
from amp_fx.weights.write_signals import install, is_watchable, may_watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from amp_fx.weights.kept_cast import Slot
    from amp_fx.weights.kept_values import Values

    Key = tuple[int, torch.dtype, bool, torch.memory_format]


class KeptCopy:
    """One kept copy: the engine's part, and whose it is."""

    __slots__ = ("__weakref__", "copy", "finalizer", "name", "num_bytes", "owner", "source")

    def __init__(
        self, source: torch.Tensor, copy: Any, slot: Slot, owner: str, num_bytes: int
    ) -> None:
        self.source = weakref.ref(source)
        self.copy = copy
        self.name = slot.name
        self.owner = owner
        self.num_bytes = num_bytes
        self.finalizer: weakref.finalize[..., torch.Tensor] | None = None

    @property
    def low(self) -> torch.Tensor:
        """The copy itself."""
        return self.copy.low  # type: ignore[no-any-return]


class Uses:
    """Whether calls take copies that are made again and again.

    Args:
        most_unused: How often in a row a copy may be asked about that no call took in between.
    """

    def __init__(self, most_unused: int) -> None:
        self._most_unused = most_unused
        self._seen: weakref.WeakKeyDictionary[KeptCopy, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )

    def is_used(self, kept: KeptCopy) -> bool:
        """Whether a copy is worth making again; to be asked once each time that it could be."""
        hits, num_unused = self._seen.get(kept, (-1, 0))
        now = kept.copy.hits
        num_unused = num_unused + 1 if hits == now else 0
        self._seen[kept] = now, num_unused
        return num_unused <= self._most_unused


class WeightCache:
    """All copies of the process.

    Nothing but ``exclusive`` guards them. Whoever finds it taken, a finalizer that runs in
    the midst of a change to them, or a signal handler that calls a model there, leaves them
    alone.
    """

    def __init__(self) -> None:
        self.streams = StreamOrder()
        self.limit: int | None = None
        self._num_copied = 0
        self.copies: dict[Key, KeptCopy] = {}
        self.epoch = 0
        self._epochs = itertools.count(1)
        self._refused_at: tuple[int, int] | None = None
        self._lock = threading.RLock()
        self._depth = 0
        self.values: weakref.WeakSet[Values] = weakref.WeakSet()
        self._postponed: deque[Callable[[], None]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is kept."""
        frozen = [values.by_identity() for values in list(self.values)]
        shared = {i: value.bytes for values in frozen for i, value in values.items()}
        return self._num_copied + sum(shared.values())

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Keeps others out; False for one who is called in the midst of a change."""
        with self._lock:
            self._depth += 1
            try:
                yield self._depth == 1
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._catch_up()

    def wait_for_refreshes(self, devices: Sequence[torch.device]) -> None:
        """Lets the current streams wait for all that this call may have found fresh.

        A refresh that another thread is at ends first: what it makes is found fresh before the
        event behind it is there.
        """
        if self.streams.are_several(devices):
            with self.exclusive():
                self.streams.wait(devices)

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Where copies come, go or move: what was known of addresses holds no longer.

        ``epoch`` is raised when that begins and when it has ended: who looks in between, from
        another thread, knows things that hold for no longer than that.
        """
        self.epoch = next(self._epochs)
        try:
            yield
        finally:
            self.epoch = next(self._epochs)

    def copy_of(self, slot: Slot, source: torch.Tensor, owner: str) -> Any:
        """The engine's copy for a slot, bound to where its weight lies; None for none."""
        if not is_watchable(source):
            return None
        key = key_of(slot, source)
        kept = self.copies.get(key)
        if kept is not None and kept.source() is source and _fits(kept.copy, slot, source):
            if not kept.copy.lies_where(source):
                if not watch(source):
                    return None
                kept.copy.bind(source)
            return kept.copy
        return self._new_copy(key, slot, source, owner)

    def described(self, slot: Slot, source: torch.Tensor) -> str:
        """A weight as the graph that asked first for its copy calls it."""
        kept = self.copies[key_of(slot, source)]
        return described(kept.name, kept.owner, source)

    def _new_copy(self, key: Key, slot: Slot, source: torch.Tensor, owner: str) -> Any:
        if key in self.copies:
            self.drop(key)
        num_bytes = 0 if slot.is_alias else source.numel() * slot.dtype.itemsize
        here = source.detach()  # another thread may give it other data meanwhile
        if not self.make_room(num_bytes) or not watch(here):
            return None
        install(source.device)
        watch_swaps()
        low = _alias(here) if slot.is_alias else slot.empty_for(here)
        copy = engine().Copy(low, here, slot.is_alias)
        kept = KeptCopy(source, copy, slot, owner, num_bytes)
        self.copies[key] = kept
        self._num_copied += num_bytes
        bury = functools.partial(self._bury, key, weakref.ref(kept))
        kept.finalizer = weakref.finalize(source, self.when_quiet, bury)
        kept.finalizer.atexit = False
        return kept.copy

    def drop(self, key: Key) -> None:
        """Forgets a copy and frees it, wherever it is known."""
        kept = self.copies.pop(key)
        self._num_copied -= kept.num_bytes
        kept.copy.drop()
        if kept.finalizer is not None:
            kept.finalizer.detach()

    def when_quiet(self, action: Callable[[], None]) -> None:
        """Does something to the copies: now, or once nobody is at work on them."""
        self._postponed.append(action)
        if self._lock.acquire(blocking=False):
            try:
                if self._depth == 0:
                    self._catch_up()
            finally:
                self._lock.release()

    def _catch_up(self) -> None:
        while self._postponed:
            self._postponed.popleft()()

    def _bury(self, key: Key, ref: weakref.ref[KeptCopy]) -> None:
        """Drops the copy of a dead weight."""
        kept = ref()
        if kept is not None and self.copies.get(key) is kept:
            self.drop(key)

    def make_room(self, num_bytes: int) -> bool:
        """Drops copies that were never hit until so many bytes fit; False if they cannot."""
        if self.limit is None or self.num_bytes + num_bytes <= self.limit:
            return True
        state = len(self.copies), self.num_bytes
        if num_bytes <= self.limit and state != self._refused_at:
            self.shrink(self.limit - num_bytes, is_unused_only=True)
        has_room = self.num_bytes + num_bytes <= self.limit
        # Until copies come or go there are no more to drop: those that were hit stay so.
        self._refused_at = None if has_room else (len(self.copies), self.num_bytes)
        return has_room

    def shrink(self, num_bytes: int, *, is_unused_only: bool = False) -> None:
        """Drops the least used copies until the rest take no more than so many bytes."""
        for values in sorted(self.values, key=lambda values: values.hits):
            if self.num_bytes > num_bytes and not (is_unused_only and values.hits > 0):
                values.drop()
        by_use = sorted(self.copies.items(), key=lambda item: item[1].copy.hits)
        for key, kept in by_use:
            if self.num_bytes <= num_bytes or (is_unused_only and kept.copy.hits > 0):
                break
            if kept.num_bytes:
                self.drop(key)


def described(name: str, owner: str, weight: torch.Tensor | None) -> str:
    """A weight in a message; None for one that died."""
    shape = () if weight is None else tuple(weight.shape)
    return f"{name} of {owner}, shape {shape},"


def watch(source: torch.Tensor) -> bool:
    """Has the writes to a tensor noticed; False where that is impossible."""
    return may_watch() and bool(engine().watch(source))


def key_of(slot: Slot, source: torch.Tensor) -> Key:
    """Under what the cache knows a copy."""
    return id(source), slot.dtype, slot.is_alias, slot.memory_format


def _alias(source: torch.Tensor) -> torch.Tensor:
    alias: torch.Tensor = engine().alias(source)
    return alias


def _fits(copy: Any, slot: Slot, source: torch.Tensor) -> bool:
    """Whether a copy can take what its weight is now; the bytes of an alias stay where they are."""
    low = copy.low
    if low is None:
        return False
    if slot.is_alias:
        return bool(copy.lies_where(source))
    return bool(
        low.device == source.device
        and low.size() == source.size()
        and low.stride() == slot.empty_for(source, device="meta").stride()
    )


@functools.cache
def watch_swaps() -> None:
    """Has what is kept of a tensor dropped before it is swapped with another."""
    before_swaps(_let_go)


def _let_go(tensor: torch.Tensor) -> None:
    """Drops what is kept of one tensor, and with that all that refers to it weakly."""
    with CACHE.exclusive():
        for values in list(CACHE.values):
            if id(tensor) in values.ids:
                values.drop()
        for key in list(CACHE.copies):
            if key[0] == id(tensor):
                CACHE.drop(key)


@contextlib.contextmanager
def making_copies() -> Iterator[None]:
    """Where copies are made: no autograd, no autocast, no inference tensors."""
    with torch.inference_mode(mode=False), torch.no_grad(), no_autocast():
        yield


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits (NaN included)."""
    bits = _BITS[left.dtype.itemsize]
    return bool(torch.equal(left.view(bits), right.view(bits)))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


CACHE = WeightCache()
"""That of the process."""


def _after_fork() -> None:
    """A child has one thread: whoever held the lock is not there."""
    CACHE._lock = threading.RLock()
    CACHE._depth = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
