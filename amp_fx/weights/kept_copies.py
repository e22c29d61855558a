"""One low-precision copy per (weight, dtype), and when it is made again.

A copy is refreshed, in place and together with all other stale ones of a call, before the
first call after a write to its weight; how writes are noticed is told in
``amp_fx.weights.storage_watch``. All graphs of a process share ``CACHE``.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.regions.state import no_autocast
from amp_fx.weights.storage_watch import StorageWatch, arm, is_armed
from amp_fx.weights.stream_order import StreamOrder, accelerator_devices
from amp_fx.weights.tensor_swaps import before_swaps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amp_fx.weights.cast_plan import Plan
    from amp_fx.weights.kept_cast import Slot


class KeptCopy:
    """One kept copy and what its weight was when it was made."""

    __slots__ = (
        "__weakref__",
        "finalizer",
        "hits",
        "low",
        "owner",
        "plans",
        "refreshes",
        "seen",
        "source",
    )

    def __init__(self, source: torch.Tensor, low: torch.Tensor, owner: str) -> None:
        self.source = weakref.ref(source)
        self.low = low
        self.owner = owner
        self.seen: Any = None
        self.finalizer: weakref.finalize[..., torch.Tensor] | None = None
        self.plans: weakref.WeakSet[Plan] = weakref.WeakSet()
        self.hits = 0
        self.refreshes = 0

    @property
    def num_uses(self) -> int:
        """Times that a call found the copy fresh."""
        return self.hits + sum(plan.num_hits for plan in self.plans)

    @property
    def num_bytes(self) -> int:
        """Bytes that the copy takes."""
        return self.low.numel() * self.low.element_size()


class WeightCache:
    """All copies of the process."""

    def __init__(self) -> None:
        self.watch = StorageWatch()
        self.streams = StreamOrder()
        self.limit: int | None = None
        self.copies: dict[tuple[int, torch.dtype], KeptCopy] = {}
        self.lock = threading.RLock()

    def refresh(self, plan: Plan, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Brings the copies of one plan up to date and returns them."""
        with self.lock, torch.inference_mode(mode=False), torch.no_grad(), no_autocast():
            stale: list[tuple[KeptCopy, torch.Tensor, Any]] = []
            lows = []
            used: set[KeptCopy] = set()
            is_kept = True
            for slot, source in zip(plan.slots, sources, strict=True):
                seen = self._seen(source)
                copy = None if seen is None else self._copy(plan, slot, source, used)
                if copy is None:
                    # Nobody can tell when such a weight is written: cast it every time.
                    lows.append(source.detach().to(slot.dtype, copy=True))
                    is_kept = False
                    continue
                used.add(copy)
                if copy.seen != seen:
                    stale.append((copy, source, seen))
                else:
                    copy.hits += 1
                lows.append(copy.low)
            self._copy_stale(stale)
            kept = tuple(lows)
            if is_kept:
                plan.remember(sources, kept)
            return kept

    def _seen(self, source: torch.Tensor) -> Any:
        """What tells one content of a weight from another; None if unwatchable."""
        if type(source) not in (torch.Tensor, torch.nn.Parameter):
            return None
        generation = self.watch.generation(source)
        if generation is None:
            return None
        place = source.storage_offset(), source.size(), source.stride()
        return generation, version_of(source), *place

    def _copy(
        self, plan: Plan, slot: Slot, source: torch.Tensor, used: set[KeptCopy]
    ) -> KeptCopy | None:
        key = (id(source), slot.dtype)
        copy = self.copies.get(key)
        if copy is None or copy.source() is not source or not _fits(copy.low, source):
            copy = self._new_copy(plan, slot, source, used)
        if copy is not None:
            copy.plans.add(plan)
        return copy

    def _new_copy(
        self, plan: Plan, slot: Slot, source: torch.Tensor, used: set[KeptCopy]
    ) -> KeptCopy | None:
        key = (id(source), slot.dtype)
        self.copies.pop(key, None)
        num_bytes = source.numel() * slot.dtype.itemsize
        unused = [c for c in self.copies.values() if c not in used and c.num_uses == 0]
        if not self.make_room(num_bytes, unused):
            return None
        _watch_swaps()
        low = torch.empty_like(source, dtype=slot.dtype, requires_grad=False)
        copy = KeptCopy(source, low, plan.owner)
        self.copies[key] = copy
        copy.finalizer = weakref.finalize(source, _drop_orphan, weakref.ref(copy), key)
        copy.finalizer.atexit = False
        return copy

    def _copy_stale(self, stale: list[tuple[KeptCopy, torch.Tensor, Any]]) -> None:
        stale = [item for item in stale if not _is_pending_and_equal(item)]
        if not stale:
            return
        # Another plan may know a copy as that of an address to which the weight comes back.
        self.watch.epoch += 1
        torch._foreach_copy_([c.low for c, _, _ in stale], [s.detach() for _, s, _ in stale])
        for copy, source, seen in stale:
            copy.seen = seen
            copy.refreshes += 1
            if not is_armed(source):  # some kernels read through a mutable pointer
                arm(source)
        self.streams.record(accelerator_devices(c.low for c, _, _ in stale))

    def make_room(self, num_bytes: int, candidates: Iterable[KeptCopy]) -> bool:
        """Drops the least used candidates until so many bytes fit; False if they cannot."""
        if self.limit is None:
            return True
        held = sum(copy.num_bytes for copy in self.copies.values())
        by_key = {copy: key for key, copy in self.copies.items()}
        for copy in sorted(candidates, key=lambda copy: copy.num_uses):
            if held + num_bytes <= self.limit:
                break
            held -= copy.num_bytes
            drop(copy, by_key[copy])
        return held + num_bytes <= self.limit


def drop(copy: KeptCopy, key: tuple[int, torch.dtype]) -> None:
    """Forgets a copy; plans that know it look at every weight again."""
    if CACHE.copies.get(key) is copy:
        del CACHE.copies[key]
    if copy.finalizer is not None:
        copy.finalizer.detach()
    for plan in list(copy.plans):
        plan.forget()


def _drop_orphan(ref: weakref.ref[KeptCopy], key: tuple[int, torch.dtype]) -> None:
    copy = ref()
    if copy is not None:
        drop(copy, key)


@functools.cache
def _watch_swaps() -> None:
    before_swaps(_let_go)


def _let_go(tensor: torch.Tensor) -> None:
    """Drops the copies of one tensor, and with them all that refers to it weakly."""
    with CACHE.lock:
        for key, copy in list(CACHE.copies.items()):
            if key[0] == id(tensor):
                drop(copy, key)


def _is_pending_and_equal(item: tuple[KeptCopy, torch.Tensor, Any]) -> bool:
    """Whether a false alarm would spoil a copy that a backward still needs.

    Writing to it, even the same bits, would make autograd refuse that backward.
    """
    copy, source, seen = item
    if copy.seen is None or not _is_shared(copy.low):
        return False
    is_equal = same_bits(source.detach().to(copy.low.dtype), copy.low)
    if is_equal:
        copy.seen = seen
    return is_equal


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether anyone but the cache holds a tensor's storage, such as a saved backward.

    Relies on ``Tensor._use_count``, which a saved tensor raises, and on
    ``torch._C._storage_Use_Count``, which a view raises, counting the storage object that
    is made here too.
    """
    if tensor._use_count() > 1:  # type: ignore[attr-defined]
        return True
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > _UNSHARED_USE_COUNT


_UNSHARED_USE_COUNT = 2


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits (NaN included)."""
    bits = _BITS[left.dtype.itemsize]
    return bool(torch.equal(left.view(bits), right.view(bits)))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fits(low: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        low.device == source.device
        and low.size() == source.size()
        and low.stride() == torch.empty_like(source, device="meta").stride()
    )


def versions_of(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """The version counter of each tensor."""
    return tuple(map(version_of, tensors))


def version_of(tensor: torch.Tensor) -> int:
    """A tensor's version counter, which inference tensors lack: 0 for them."""
    return 0 if tensor.is_inference() else tensor._version


CACHE = WeightCache()
"""That of the process."""
