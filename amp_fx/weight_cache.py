"""Keeps one low-precision copy per (weight, dtype) and refreshes it when it goes stale.

Graphs whose weight casts were taken out (``keep_weight_casts``) get the copies as inputs.
All graphs of a process share them. A copy is refreshed, in place and together with all
other stale ones of the call, before the first call after a write to its weight; how
writes are noticed is told in ``amp_fx.storage_watch``. What nothing can notice is a write
through a NumPy array or another alias outside PyTorch that was taken before the first
call: after such a write call ``invalidate()``.

Use::

    amp_fx.weight_cache.stats()            # entries, bytes, hits, refreshes
    amp_fx.weight_cache.invalidate(model)  # refresh its copies at the next call
    amp_fx.weight_cache.clear()            # drop all copies
    amp_fx.weight_cache.set_limit(2**30)   # bytes that copies may take together
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import StaleWeightError
from amp_fx.regions import no_autocast
from amp_fx.storage_watch import StorageWatch, arm, is_armed, storage_address_of
from amp_fx.stream_order import StreamOrder, accelerator_devices
from amp_fx.tables.presets import torch_version
from amp_fx.tensor_swaps import before_swaps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from amp_fx.kept_cast import Slot

VERIFY_ENVIRONMENT = "AMP_FX_VERIFY"


class _Copy:
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
        return self.low.numel() * self.low.element_size()


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """What a plan's weights were when their copies were last found fresh."""

    epoch: int
    versions: tuple[int, ...] | None
    lows: tuple[torch.Tensor, ...]


class Plan:
    """The kept casts of one compiled graph.

    Args:
        slots: What to pass, in the order of the graph's added inputs.
        owner: The name under which ``stats`` counts the copies: function and file.
        passed: Positions of the inputs that the graph takes besides the copies.
        writes_inputs: Whether the graph writes to any of its inputs.
        verify: Whether to compare every copy with a fresh cast on every call.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        owner: str,
        passed: Sequence[int],
        writes_inputs: bool,
        verify: bool,
    ) -> None:
        self.slots = tuple(slots)
        self.owner = owner
        self.passed = tuple(passed)
        self.verify = verify or os.environ.get(VERIFY_ENVIRONMENT) == "1"
        self.num_hits = 0
        self._select = _tuple_getter([slot.source_index for slot in slots])
        # A graph that writes to an input may write to a weight through shared storage.
        read = [] if writes_inputs else [s.source_index for s in slots if s.is_read]
        self._select_read = _tuple_getter(read)
        # By place: one graph may serve many layers, each with its own weights.
        self._snapshots: dict[Any, _Snapshot] = {}
        self._devices: tuple[torch.device, ...] = ()
        self._has_parts = False
        self._needs_layouts = not _guards_see_layouts()

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph as a function of the inputs that Dynamo knows."""
        select_passed = _tuple_getter(self.passed)

        def call(*args: Any) -> Any:
            lows = self.lows(args)
            read = [(tensor, _version(tensor)) for tensor in self._select_read(args)]
            result = compiled(*select_passed(args), *lows)
            for tensor, version in read:
                # Kernels read inputs through a mutable pointer; this graph writes none.
                if not is_armed(tensor) and _version(tensor) == version:
                    arm(tensor)
            return result

        return call

    def lows(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """The copies for one call, fresh."""
        sources = self._select(args)
        if self._devices and torch.cuda.is_current_stream_capturing():
            # The user captures the call: a replay of it must cast for itself.
            return tuple(
                source.detach().to(slot.dtype)
                for slot, source in zip(self.slots, sources, strict=True)
            )
        snapshot = self._snapshots.get(self._place(sources))
        # The epoch comes last: a thread that notices a write raises it before it arms.
        if (
            snapshot is not None
            and all(map(is_armed, sources))
            and (snapshot.versions is None or _versions(sources) == snapshot.versions)
            and snapshot.epoch == _cache.watch.epoch
        ):
            self.num_hits += 1
            lows = snapshot.lows
        else:
            lows = _cache.refresh(self, sources)
        if self._devices:
            _cache.streams.wait(self._devices)
        if self.verify:
            self._verify(sources, lows)
        return lows

    def remember(self, sources: Sequence[torch.Tensor], lows: tuple[torch.Tensor, ...]) -> None:
        """Takes the quick way as long as these sources stay as they are."""
        self._devices = accelerator_devices(lows)
        self._has_parts = self._has_parts or any(map(_is_part, sources))
        if len(self._snapshots) >= _MAX_SNAPSHOTS:
            self._snapshots.clear()
        self._snapshots[self._place(sources)] = _Snapshot(
            epoch=_cache.watch.epoch,
            # The replay of a captured optimizer step asks for no pointer, but raises versions.
            versions=_versions(sources) if self._devices else None,
            lows=lows,
        )

    def _place(self, sources: Sequence[torch.Tensor]) -> Any:
        """Where weights lie: the addresses of their storages, and the offsets into them.

        Dynamo guards sizes and dtypes: a weight that fills its storage lies at its start.
        """
        offsets = tuple(map(_offset_of, sources)) if self._has_parts else ()
        layouts = tuple((s.size(), s.stride()) for s in sources) if self._needs_layouts else ()
        return tuple(map(storage_address_of, sources)), offsets, layouts

    def forget(self) -> None:
        """Looks at every weight again on the next call."""
        self._snapshots.clear()

    def _verify(self, sources: Sequence[torch.Tensor], lows: Sequence[torch.Tensor]) -> None:
        with torch.no_grad(), no_autocast():
            for slot, source, low in zip(self.slots, sources, lows, strict=True):
                if not same_bits(source.detach().to(slot.dtype), low):
                    raise StaleWeightError(
                        f"the kept {slot.dtype} copy of input {slot.source_index} of a graph of "
                        f"{self.owner}, shape {tuple(source.shape)}, is stale: it was written "
                        "where PyTorch cannot see it; call amp_fx.weight_cache.invalidate() "
                        "after such writes, or compile with options={'weight_cache': False}"
                    )


class _WeightCache:
    """All copies of the process."""

    def __init__(self) -> None:
        self.watch = StorageWatch()
        self.streams = StreamOrder()
        self.limit: int | None = None
        self.copies: dict[tuple[int, torch.dtype], _Copy] = {}
        self.lock = threading.RLock()

    def refresh(self, plan: Plan, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Brings the copies of one plan up to date and returns them."""
        with self.lock, torch.inference_mode(mode=False), torch.no_grad(), no_autocast():
            stale: list[tuple[_Copy, torch.Tensor, Any]] = []
            lows = []
            used: set[_Copy] = set()
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
        return generation, _version(source), *place

    def _copy(self, plan: Plan, slot: Slot, source: torch.Tensor, used: set[_Copy]) -> _Copy | None:
        key = (id(source), slot.dtype)
        copy = self.copies.get(key)
        if copy is None or copy.source() is not source or not _fits(copy.low, source):
            copy = self._new_copy(plan, slot, source, used)
        if copy is not None:
            copy.plans.add(plan)
        return copy

    def _new_copy(
        self, plan: Plan, slot: Slot, source: torch.Tensor, used: set[_Copy]
    ) -> _Copy | None:
        key = (id(source), slot.dtype)
        self.copies.pop(key, None)
        num_bytes = source.numel() * slot.dtype.itemsize
        unused = [c for c in self.copies.values() if c not in used and c.num_uses == 0]
        if not self.make_room(num_bytes, unused):
            return None
        _watch_swaps()
        low = torch.empty_like(source, dtype=slot.dtype, requires_grad=False)
        copy = _Copy(source, low, plan.owner)
        self.copies[key] = copy
        copy.finalizer = weakref.finalize(source, _drop, weakref.ref(copy), key)
        copy.finalizer.atexit = False
        return copy

    def _copy_stale(self, stale: list[tuple[_Copy, torch.Tensor, Any]]) -> None:
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

    def make_room(self, num_bytes: int, candidates: Iterable[_Copy]) -> bool:
        """Drops the least used candidates until so many bytes fit; False if they cannot."""
        if self.limit is None:
            return True
        held = sum(copy.num_bytes for copy in self.copies.values())
        by_key = {copy: key for key, copy in self.copies.items()}
        for copy in sorted(candidates, key=lambda copy: copy.num_uses):
            if held + num_bytes <= self.limit:
                break
            held -= copy.num_bytes
            _drop(weakref.ref(copy), by_key[copy])
        return held + num_bytes <= self.limit


def _drop(ref: weakref.ref[_Copy], key: tuple[int, torch.dtype]) -> None:
    copy = ref()
    if copy is None:
        return
    if _cache.copies.get(key) is copy:
        del _cache.copies[key]
    if copy.finalizer is not None:
        copy.finalizer.detach()
    for plan in list(copy.plans):
        plan.forget()


@functools.cache
def _watch_swaps() -> None:
    before_swaps(_let_go)


def _let_go(tensor: torch.Tensor) -> None:
    """Drops the copies of one tensor, and with them all that refers to it weakly."""
    with _cache.lock:
        for key, copy in list(_cache.copies.items()):
            if key[0] == id(tensor):
                _drop(weakref.ref(copy), key)


def _is_pending_and_equal(item: tuple[_Copy, torch.Tensor, Any]) -> bool:
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


_MAX_SNAPSHOTS = 256


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor is smaller than its storage."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


_offset_of: Callable[[torch.Tensor], Any] = torch.Tensor.storage_offset


def _guards_see_layouts() -> bool:
    """Whether Dynamo looks at the sizes and strides of a module's weights on every call.

    Before pytorch#177525 it takes a module whose dictionaries were not written for
    unchanged, so that a graph outlives ``weight.t_()``; torch 2.13 has it.
    """
    return torch_version() >= (2, 13)


def _versions(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    return tuple(map(_version, tensors))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _tuple_getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """``itemgetter`` that gives a tuple for any number of indices."""
    if not indices:
        return lambda _: ()
    if len(indices) == 1:
        index = indices[0]
        return lambda items: (items[index],)
    return operator.itemgetter(*indices)


_cache = _WeightCache()


@dataclasses.dataclass(frozen=True)
class Stats:
    """What the cache holds and did.

    Attributes:
        entries: Number of copies.
        bytes: Bytes that they take.
        hits: Times that a call found a copy fresh.
        refreshes: Times that a copy was made or made again.
        by_model: The same, by the function (and file) whose graph asked first.
    """

    entries: int
    bytes: int
    hits: int
    refreshes: int
    by_model: dict[str, Stats] = dataclasses.field(default_factory=dict)


def stats() -> Stats:
    """Counts of the copies that are alive."""
    with _cache.lock:
        copies = list(_cache.copies.values())
    owners = {copy.owner for copy in copies}
    by_model = {o: _count(c for c in copies if c.owner == o) for o in sorted(owners)}
    return dataclasses.replace(_count(copies), by_model=by_model)


def _count(copies: Iterable[_Copy]) -> Stats:
    copies = list(copies)
    return Stats(
        entries=len(copies),
        bytes=sum(copy.num_bytes for copy in copies),
        hits=sum(copy.num_uses for copy in copies),
        refreshes=sum(copy.refreshes for copy in copies),
    )


_INVALID = ()
"""What no weight was ever seen as, while None says that a copy was never filled."""


def invalidate(model_or_tensor: torch.nn.Module | torch.Tensor | None = None) -> None:
    """Has copies made again before their next use.

    Args:
        model_or_tensor: Whose copies; None for all.
    """
    tensors = _tensors_of(model_or_tensor)
    with _cache.lock:
        for copy in list(_cache.copies.values()):
            source = copy.source()
            if tensors is None or id(source) in tensors:
                copy.seen = _INVALID
                for plan in list(copy.plans):
                    plan.forget()


def _tensors_of(model_or_tensor: Any) -> set[int] | None:
    if model_or_tensor is None:
        return None
    if isinstance(model_or_tensor, torch.Tensor):
        return {id(model_or_tensor)}
    if isinstance(model_or_tensor, torch.nn.Module):
        parts = (*model_or_tensor.parameters(), *model_or_tensor.buffers())
        return {id(tensor) for tensor in parts}
    raise TypeError(
        f"invalidate takes a module, a tensor or None, not {type(model_or_tensor).__name__}"
    )


def clear() -> None:
    """Drops all copies and stops watching their weights, until graphs are called again.

    Call it before resizing the storage of a weight (``untyped_storage().resize_``), which
    torch refuses for a storage that is watched.
    """
    with _cache.lock:
        for key, copy in list(_cache.copies.items()):
            source = copy.source()
            if source is not None and source.device.type != "meta":
                source.data_ptr()  # asks for a mutable pointer, which disarms
            _drop(weakref.ref(copy), key)


def set_limit(num_bytes: int | None) -> None:
    """Bounds the bytes that copies take together; past it, weights are cast per call.

    Args:
        num_bytes: The bound; None for none. Copies with the fewest hits go first; a newcomer
            takes the place of copies that were never hit, or is not kept.

    Raises:
        ValueError: The bound is negative.
    """
    if num_bytes is not None and num_bytes < 0:
        raise ValueError(f"the limit is a number of bytes or None, not {num_bytes}")
    with _cache.lock:
        _cache.limit = num_bytes
        _cache.make_room(0, list(_cache.copies.values()))
