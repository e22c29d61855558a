"""Process-wide store of values computed from weights.

Graphs and ``amp_fx.keep`` objects that need the same value of the same weights share one entry.
After a write to one of its weights (``amp_fx.weights.write_signals``), a value is recomputed before
its next use. The new value reuses the memory of the old one unless that may still be read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.torch_private.kernels import foreach_copy_
from amp_fx.torch_private.tensors import data_address
from amp_fx.weights.cache_entry import CacheEntry, compute, computing_values, copied_into
from amp_fx.weights.cpu.huge_pages import in_huge_pages
from amp_fx.weights.spread import part_of
from amp_fx.weights.streams import StreamOrder
from amp_fx.weights.swaps import before_swaps
from amp_fx.weights.watch import engine
from amp_fx.weights.write_signals import install, watch_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from amp_fx.weights.cache_entry import Key, ValueSpec, Weights

MAX_FOREACH_ELEMENTS = 320 * 65536
"""Number of elements that one CUDA launch of a foreach kernel covers: 320 blocks of 65,536
(``ATen/native/cuda/MultiTensorApply.cuh``). Larger tensors are copied faster one by one."""


# Note [Why a refresh starts before it computes]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A refresh has three steps: ``start`` records the state of the weights (the count of writes, the
# version and the sampled elements), then the values are computed, then ``finish`` marks them as
# fresh in the recorded state. A write by another thread, or by a hook that runs meanwhile, may
# come before or after the weight was read. With the state of the start, the value counts as stale
# in both cases, and the next call computes it again, which costs time only. With the state of the
# end, the write would be part of the recorded state, and a value of the old weight would be used.
#
# The same holds for values that are computed while a graph is compiled: ``Store.start`` comes
# before the passes that fold constants, and ``Store.adopt`` after the compilation.


# Note [Values are computed from aliases]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Another thread may move a weight at any time (``weight.data = other``). If it does so after the
# slot was bound and before the value is computed, the value is that of ``other``, and it counts as
# fresh once the weight is back in the memory that the slot is bound to. Nobody else has the aliases
# (``detach``), so they stay where the slot is bound to, while the value is computed as well.


class Store:
    """All values of the process, protected by ``locked``.

    The lock is reentrant. Code that may run on a thread that has the lock, such as a finalizer or a
    signal handler that calls a model, must not touch the values.
    """

    def __init__(self) -> None:
        self.streams = StreamOrder()
        self.limit: int | None = None
        self.entries: dict[Key, CacheEntry] = {}
        self._by_weight: defaultdict[int, dict[Key, CacheEntry]] = defaultdict(dict)
        self._num_entries_at_limit: int | None = None
        self._lock = threading.RLock()
        self._depth = 0
        self._postponed: deque[Callable[[], None]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of all values; a value that several entries share counts once."""
        entries = list(self.entries.values())
        return sum({id(entry.value): entry.num_bytes for entry in entries}.values())

    @contextlib.contextmanager
    def locked(self, *, waits: bool = True) -> Iterator[bool]:
        """Acquires the lock; yields False on re-entry by the same thread.

        Args:
            waits: Whether to wait if another thread has the lock; otherwise yields False. A thread
                that holds Dynamo's lock must not wait, because the other thread may compile a
                function to compute values.
        """
        if not self._lock.acquire(blocking=waits):
            yield False
            return
        # Computing a value may run code of the user, such as an op of a subclass or a finalizer of
        # the garbage collector, and that may call a compiled graph again, in this thread. The inner
        # call must not change entries in the midst of a change, so it computes values for itself.
        self._depth += 1
        try:
            yield self._depth == 1
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._run_postponed()
            self._lock.release()

    def run_when_unlocked(self, action: Callable[[], None]) -> None:
        """Runs an action on the entries, now or when the lock is released."""
        # Finalizers run at any point of any thread. One that waited for the lock could wait for
        # the thread that it interrupted.
        self._postponed.append(action)
        if self._lock.acquire(blocking=False):
            try:
                if self._depth == 0:
                    self._run_postponed()
            finally:
                self._lock.release()

    def _run_postponed(self) -> None:
        while self._postponed:
            self._postponed.popleft()()

    def after_fork(self) -> None:
        """Replaces the lock in a child process, where a thread that held it does not exist."""
        self._lock = threading.RLock()
        self._depth = 0

    def wait_for_refreshes(self, devices: Sequence[torch.device]) -> None:
        """Makes the current streams wait for refreshes of all values that are fresh now."""
        if self.streams.are_several(devices):
            # A refresh in another thread marks values as fresh before it records their event, so
            # the lock is needed to see the event.
            with self.locked():
                self.streams.wait(devices)

    def entry(self, spec: ValueSpec, weights: Weights, owner: str) -> CacheEntry | None:
        """Returns the entry of a value, bound to the current memory of the weights.

        Returns None if writes to a weight would not be detected.
        """
        # Identities, because hashing a tensor would need its contents. ``is_of`` checks that the
        # identity still belongs to the same weight.
        key = (tuple(map(id, weights)), spec.key(weights))
        entry = self.entries.get(key)
        if entry is not None and entry.is_of(weights):
            if entry.slot.matches(weights):
                return entry
            if watch_all(weights):
                self._rebind(entry, weights)
                return entry
        # The weight of the entry was freed, and the identity of its object was used again; or
        # its new memory cannot be watched.
        if entry is not None:
            self.drop(entry)
        return self._new_entry(key, spec, weights, owner) if watch_all(weights) else None

    def of_weight(self, weight: torch.Tensor) -> list[CacheEntry]:
        """Returns the entries of values computed from a weight."""
        return list(self._by_weight.get(id(weight), {}).values())

    def _new_entry(self, key: Key, spec: ValueSpec, weights: Weights, owner: str) -> CacheEntry:
        # Signals are installed with the first entry: a process that caches nothing has no hooks.
        install()
        before_swaps(forget)
        slot = engine().CacheSlot(_aliases(weights), spec.is_alias)
        entry = CacheEntry(key, slot, spec, weights, owner)
        on_freed = functools.partial(self._on_weight_freed, weakref.ref(entry))
        # Values go with the first of their weights: without it, they cannot be computed again.
        for weight in weights:
            finalizer = weakref.finalize(weight, self.run_when_unlocked, on_freed)
            finalizer.atexit = False
            entry.finalizers.append(finalizer)
            self._by_weight[id(weight)][key] = entry
        self.entries[key] = entry
        return entry

    def _rebind(self, entry: CacheEntry, weights: Weights) -> None:
        """Binds entries to the weights' current memory and drops aliases of the old memory."""
        rebound = {entry}
        for weight in weights:
            # Aliases, which take no bytes, would prevent the old memory from being freed.
            rebound.update(other for other in self.of_weight(weight) if not other.num_bytes)
        for other in rebound:
            current = other.weights()
            if current:
                _bind(other, _aliases(current))

    def refresh(self, entries: Sequence[CacheEntry], weights: Sequence[Weights]) -> None:
        """Recomputes stale values.

        Args:
            entries: Entries to refresh.
            weights: The weights of each entry.
        """
        slots, sources = tuple([entry.slot for entry in entries]), tuple(weights)
        positions = engine().stale(slots, sources)
        if not positions:
            return
        stale = [entries[i] for i in positions]
        slots = tuple([slots[i] for i in positions])
        # See Note [Values are computed from aliases].
        sources = tuple([_aliases(sources[i]) for i in positions])
        for entry, aliases in zip(stale, sources, strict=True):
            _bind(entry, aliases)
        olds = engine().reusable(slots)
        pairs = zip(stale, olds, strict=True)
        # Frees stale values whose memory cannot be reused before new ones are computed, so that
        # both are not in memory at once.
        self._evict([entry for entry, old in pairs if old is None and not entry.is_cast])
        # See Note [Why a refresh starts before it computes].
        engine().start(slots, sources)
        with torch.profiler.record_function("amp_fx::refresh"):
            values = self._recompute(stale, sources, olds)
        # Before ``finish``, after which calls in other threads find the memory.
        allocated = self.streams.allocated()
        engine().finish(slots, tuple(values))
        for entry, value, old in zip(stale, values, olds, strict=True):
            if value is not old:
                entry.allocated = allocated

    def memory_check(self) -> Callable[[CacheEntry, Weights], bool]:
        """Returns a function that tells whether no other stream may still read a value.

        It is valid until the current streams change.
        """
        free_since = functools.cache(self.streams.free_since)

        def is_free(entry: CacheEntry, weights: Weights) -> bool:
            return all(entry.allocated >= free_since(weight.device) for weight in weights)

        return is_free

    def start(self, weights: Weights) -> Any:
        """Records the state of weights before values are computed outside of the store.

        Args:
            weights: Aliases of the weights (``detach``; Note [Values are computed from aliases]).

        Returns:
            A slot for ``adopt``; None if the weights cannot be watched now.
        """
        with self.locked(waits=False) as is_outermost, computing_values():
            if not is_outermost or not watch_all(weights):
                return None
            started = engine().CacheSlot(weights, False)
            engine().start((started,), (weights,))
            return started

    def adopt(
        self, entry: CacheEntry, value: Any, started: Any, positions: tuple[int, ...]
    ) -> None:
        """Stores a value that was computed after ``start``.

        The value is stale if a weight was written since ``start``.

        Args:
            entry: The entry of the value.
            value: The value.
            started: The slot that ``start`` returned.
            positions: Positions of the entry's weights among the weights of ``start``.
        """
        weights = entry.weights()
        # Another thread may have computed the value meanwhile; that one is as good.
        if weights is not None and entry.value is None:
            entry.slot.adopt(started, positions)
            value = _moved(entry, value, weights)
            engine().finish((entry.slot,), (value,))
            entry.set_value_bytes(value, weights)

    def _recompute(
        self, entries: Sequence[CacheEntry], sources: Sequence[Weights], olds: Sequence[Any]
    ) -> list[Any]:
        """Computes values in the memory of the old values if that can be reused.

        One foreach op writes all casts with the strides of their weights; it would copy tensor by
        tensor if the strides of one cast differed.

        Args:
            entries: Entries of the values.
            sources: The weights of each entry.
            olds: The old value of each entry if its memory can be reused, else None.
        """
        is_free = self.memory_check()
        values: list[Any] = []
        targets, copied = [], []
        for entry, weights, old in zip(entries, sources, olds, strict=True):
            value: Any = old if is_free(entry, weights) else None
            if value is None or not entry.is_cast:
                value = self._allocate_or_compute(entry, weights, value)
            if entry.is_in_foreach_copy:
                targets.append(value)
                copied.append(weights[0])
            elif entry.is_cast:
                value.copy_(weights[0])
            values.append(value)
        if targets:
            foreach_copy_(targets, copied)
        return values

    def _allocate_or_compute(self, entry: CacheEntry, weights: Weights, old: Any) -> Any:
        """Allocates memory for a cast, which the caller fills, or computes any other value."""
        layout = None if entry.spec.is_alias else entry.spec.cast_layout(weights[0])
        if layout is not None:
            (weight,), (dtype, strides) = weights, layout
            value = torch.empty_strided(weight.size(), strides, dtype=dtype, device=weight.device)
            is_small = weight.device.type == "cpu" or weight.numel() < MAX_FOREACH_ELEMENTS
            entry.is_cast = True
            entry.is_in_foreach_copy = is_small and strides == weight.stride()
        else:
            value = compute(entry.spec, weights)
            value = _moved(entry, value, weights) if old is None else copied_into(old, value)
        entry.set_value_bytes(value, weights)
        return value

    def drop(self, entry: CacheEntry) -> None:
        """Removes an entry; frees its value and the code that is bound to the value."""
        entry.slot.value = None
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
        for identity in entry.key[0]:  # type: ignore[attr-defined]
            entries = self._by_weight.get(identity, {})
            if entries.get(entry.key) is entry:
                del entries[entry.key]
            if not entries:
                self._by_weight.pop(identity, None)
        for finalizer in entry.finalizers:
            finalizer.detach()
        _evict_code([entry])

    def _evict(self, entries: Sequence[CacheEntry]) -> None:
        """Frees stale values and the code bound to them, including entries that share a value."""
        evicted = set(entries)
        for entry in entries:
            value = entry.value
            if value is not None:
                others = self._by_weight.get(entry.key[0][0], {}).values()  # type: ignore[index]
                evicted.update(other for other in others if other.value is value)
        for entry in evicted:
            entry.slot.value = None
        _evict_code(evicted)

    def drop_unused(self) -> None:
        """Drops values whose calls were all freed."""
        for entry in list(self.entries.values()):
            if not entry.calls:
                self.drop(entry)

    def _on_weight_freed(self, ref: weakref.ref[CacheEntry]) -> None:
        entry = ref()
        if entry is not None and entry.value is not None:
            self.drop(entry)

    def enforce_limit(self, entries: Sequence[CacheEntry]) -> None:
        """Drops values without hits until the limit is met, those of ``entries`` last."""
        limit = self.limit
        if limit is None or self.num_bytes <= limit:
            return
        if self._num_entries_at_limit != len(self.entries):  # else all others have hits
            self.shrink(limit, spared=entries, is_unused_only=True)
        for entry in sorted(entries, key=lambda entry: entry.slot.hits):
            if self.num_bytes > limit and entry.num_bytes:
                self.drop(entry)
        self._num_entries_at_limit = len(self.entries)

    def shrink(
        self, num_bytes: int, *, spared: Iterable[CacheEntry] = (), is_unused_only: bool = False
    ) -> None:
        """Drops values with the fewest hits until the rest take at most ``num_bytes``."""
        spared_entries = set(spared)
        for entry in sorted(self.entries.values(), key=lambda entry: entry.slot.hits):
            if self.num_bytes <= num_bytes or (is_unused_only and entry.slot.hits > 0):
                break
            if entry.num_bytes and entry not in spared_entries:
                self.drop(entry)


def _moved(entry: CacheEntry, value: Any, weights: Weights) -> Any:
    """Returns a new value, in huge pages if it is one large tensor that shares no storage."""
    if entry.spec.is_alias or isinstance(value, tuple):
        return value
    is_view = value.layout is torch.strided and data_address(value) in map(data_address, weights)
    return value if is_view else in_huge_pages(value)


def _evict_code(entries: Iterable[CacheEntry]) -> None:
    """Drops compiled code that was bound to evicted values."""
    for call in {call for entry in entries for call in entry.calls}:
        call.evict()


def _aliases(weights: Weights) -> Weights:
    return tuple([weight.detach() for weight in weights])


def _bind(entry: CacheEntry, aliases: Weights) -> None:
    """Binds an entry to the memory of aliases; a value that does not fit there is dropped."""
    if entry.slot.matches(aliases):
        return
    entry.slot.bind(aliases)
    if not _can_refill(entry, aliases):
        entry.slot.value = None
        entry.is_cast = entry.is_in_foreach_copy = False


def _can_refill(entry: CacheEntry, weights: Weights) -> bool:
    """Returns True if a rebound weight's cast fits into the memory of the old cast."""
    if not entry.is_cast or entry.value is None:
        return False
    value, layout = entry.value, entry.spec.cast_layout(weights[0])
    old = value.dtype, value.stride(), value.size(), value.device
    return layout is not None and old == (*layout, weights[0].size(), weights[0].device)


def forget(tensor: torch.Tensor) -> None:
    """Drops all values of a tensor and the store's weak references to it."""
    with STORE.locked():
        for entry in STORE.of_weight(tensor):
            STORE.drop(entry)


def tensors_of(model_or_tensor: torch.nn.Module | torch.Tensor) -> list[torch.Tensor]:
    """Returns a module's parameters and buffers, or the tensor itself, as local tensors.

    Raises:
        TypeError: The argument is neither a module nor a tensor.
    """
    if isinstance(model_or_tensor, torch.Tensor):
        return [part_of(model_or_tensor)]
    if isinstance(model_or_tensor, torch.nn.Module):
        parts = (*model_or_tensor.parameters(), *model_or_tensor.buffers())
        return [part_of(tensor) for tensor in parts]
    raise TypeError(
        f"invalidate expects a module, a tensor or None, got {type(model_or_tensor).__name__}"
    )


STORE = Store()
"""The store of the process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=STORE.after_fork)
