"""Stores every value that is computed from weights, each once for the whole process.

An entry holds a value, how to make it, and what its weights were when it was made (``Kept`` in
``csrc/watch.cpp``). All graphs and all ``amp_fx.keep`` objects that want the same of the same
weights share one entry. A value is made again before the first use after a write to any of its
weights; ``amp_fx.weights.write_signals`` says how writes are noticed. It is made in the same
memory, so that it keeps its address, unless somebody may still be reading the old one.

``torch.utils.swap_tensors`` may take tensors that are watched weakly.
It refuses a tensor that anything refers to weakly, as it cannot tell who would be misled;
``Module.to`` and ``load_state_dict`` swap too, where the program asks them to. Whoever
watches tensors is told first here, and lets go of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Protocol

import torch

from amp_fx.regions.state import no_autocast
from amp_fx.weights.compiled_prepare import empty_values, is_compiled, write_values
from amp_fx.weights.engine import engine
from amp_fx.weights.spread import part_of
from amp_fx.weights.stream_order import StreamOrder
from amp_fx.weights.write_signals import install, is_watchable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from amp_fx.weights.call import CachedCall

    LetGo = Callable[[torch.Tensor], Callable[[], None] | None]
    Weights = tuple[torch.Tensor, ...]
    Key = tuple[Hashable, ...]

_let_go: list[LetGo] = []


def before_swaps(let_go: LetGo) -> None:
    """Calls a function with each tensor that is about to be swapped.

    What it returns, unless that is None, is called once the tensors are swapped.

    Replaces ``torch.utils.swap_tensors`` once; a reference to it that was taken before
    still refuses.
    """
    if not _let_go:
        torch.utils.swap_tensors = _telling(torch.utils.swap_tensors)
    _let_go.append(let_go)


def _telling(
    swap: Callable[[torch.Tensor, torch.Tensor], None],
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        behind = [let_go(tensor) for let_go in _let_go for tensor in (t1, t2)]
        try:
            swap(t1, t2)
        finally:
            for act in filter(None, behind):
                act()

    return swap_tensors


class Wanted(Protocol):
    """A value that a graph, or a user of ``amp_fx.keep``, wants of some of its inputs."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the weights among the inputs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights in the user's program."""

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the ops that make the value, in order."""

    @property
    def is_alias(self) -> bool:
        """Whether the value is the weight's own bytes."""

    def key(self, weights: Weights) -> Hashable:
        """Equal for values that are alike if they are made of the same weights."""

    def make(self, weights: Weights) -> Any:
        """Makes the value: a tensor or a tuple of tensors."""

    def laid_out(self, weight: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Dtype and strides of the value if it is a cast of one weight; else None."""


class Entry:
    """One value of the store.

    Attributes:
        kept: The engine's part, with the value.
        wanted: What made it.
        owner: The model, or function, whose graph asked for it first.
        calls: The compiled graphs and ``keep`` objects that use it.
        made_bytes: Bytes that its latest value takes, or took, besides the weights.
        is_cast: Whether the value is memory that casts of one weight are written to.
        is_listed: Whether it is cast together with others, by one op.
    """

    __slots__ = (
        *("__weakref__", "calls", "finalizers", "is_cast", "is_listed", "kept", "key"),
        *("made_bytes", "owner", "refs", "wanted"),
    )

    def __init__(self, key: Key, kept: Any, wanted: Wanted, weights: Weights, owner: str) -> None:
        self.key = key
        self.kept = kept
        self.wanted = wanted
        self.owner = owner
        self.made_bytes = 0
        self.is_cast = self.is_listed = False
        self.calls: weakref.WeakSet[CachedCall] = weakref.WeakSet()
        self.refs = tuple(weakref.ref(weight) for weight in weights)
        self.finalizers: list[weakref.finalize[..., torch.Tensor]] = []

    @property
    def value(self) -> Any:
        """The value; None once it was dropped."""
        return self.kept.value

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes now besides the weights."""
        return 0 if self.kept.value is None else self.made_bytes

    def weights(self) -> Weights | None:
        """Its weights; None if one of them died."""
        alive = tuple(ref() for ref in self.refs)
        return None if any(weight is None for weight in alive) else alive  # type: ignore[return-value]

    def is_fresh(self) -> bool:
        """Whether its weights lie where they did, and no signal tells of a write."""
        weights = self.weights()
        return weights is not None and bool(self.kept.is_fresh(weights))


class Store:
    """All values of the process.

    Nothing but ``exclusive`` guards them. Whoever finds it taken, a finalizer that runs during a
    change to them or a signal handler that calls a model there, leaves them alone.
    """

    def __init__(self) -> None:
        self.streams = StreamOrder()
        self.limit: int | None = None
        self.entries: dict[Key, Entry] = {}
        self._by_weight: defaultdict[int, dict[Key, Entry]] = defaultdict(dict)
        self._refused_at: int | None = None
        self._lock = threading.RLock()
        self._depth = 0
        self._postponed: deque[Callable[[], None]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is kept; what several entries share counts once."""
        return _num_bytes_of(self.entries.values())

    @contextlib.contextmanager
    def exclusive(self, *, waits: bool = True) -> Iterator[bool]:
        """Keeps others out; False for one who is called in the midst of a change.

        Args:
            waits: Whether to wait for another thread that is at it; else that gives False, too.
                Who holds Dynamo's lock must not: values may be made by compiled functions.
        """
        if not self._lock.acquire(blocking=waits):
            yield False
            return
        self._depth += 1
        try:
            yield self._depth == 1
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._catch_up()
            self._lock.release()

    def after_fork(self) -> None:
        """A child has one thread: whoever held the lock is not there."""
        self._lock = threading.RLock()
        self._depth = 0

    def wait_for_refreshes(self, devices: Sequence[torch.device]) -> None:
        """Makes the current streams wait for all that this call may have found fresh.

        A refresh that another thread is at ends first: what it makes is found fresh before the
        event behind it is there.
        """
        if self.streams.are_several(devices):
            with self.exclusive():
                self.streams.wait(devices)

    def entry(self, wanted: Wanted, weights: Weights, owner: str) -> Entry | None:
        """The entry of a value, bound to where its weights lie; None if it cannot be kept."""
        key = (tuple(map(id, weights)), wanted.key(weights))
        entry = self.entries.get(key)
        if entry is not None and all(
            ref() is w for ref, w in zip(entry.refs, weights, strict=True)
        ):
            if entry.kept.lies_where(weights):
                return entry
            if all(is_watchable(w) and watch(w.detach()) for w in weights):
                self._rebind(entry, weights)
                return entry
        if entry is not None:
            self.drop(entry)
        if not all(is_watchable(w) and watch(w.detach()) for w in weights):
            return None
        return self._new_entry(key, wanted, weights, owner)

    def of_weight(self, weight: torch.Tensor) -> list[Entry]:
        """The entries that are made of a weight."""
        return list(self._by_weight.get(id(weight), {}).values())

    def _new_entry(self, key: Key, wanted: Wanted, weights: Weights, owner: str) -> Entry:
        install()
        watch_swaps()
        # Another thread may give a weight other data meanwhile: all is noted of one place.
        here = tuple(weight.detach() for weight in weights)
        entry = Entry(key, engine().Kept(here, wanted.is_alias), wanted, weights, owner)
        bury = functools.partial(self._bury, weakref.ref(entry))
        for weight in weights:
            finalizer = weakref.finalize(weight, self.when_quiet, bury)
            finalizer.atexit = False
            entry.finalizers.append(finalizer)
            self._by_weight[id(weight)][key] = entry
        self.entries[key] = entry
        return entry

    def _rebind(self, entry: Entry, weights: Weights) -> None:
        """Notes where weights lie now, and lets go of aliases of where they lay."""
        for other in {entry, *(e for weight in weights for e in self.of_weight(weight))}:
            theirs = other.weights()
            if other is not entry and (other.num_bytes or not theirs):
                continue
            if theirs and not other.kept.lies_where(theirs):
                other.kept.bind(tuple(weight.detach() for weight in theirs))
                if not _fits(other, theirs):
                    other.kept.value = None
                    other.is_cast = other.is_listed = False

    def refresh(self, entries: Sequence[Entry], weights: Sequence[Weights]) -> None:
        """Recomputes stale values.

        Args:
            entries: Entries to make fresh.
            weights: The weights of each.
        """
        kepts, sources = tuple([entry.kept for entry in entries]), tuple(weights)
        positions = engine().stale(kepts, sources)
        if not positions:
            return
        stale = [entries[i] for i in positions]
        if len(positions) < len(entries):
            kepts = tuple([kepts[i] for i in positions])
            sources = tuple([sources[i] for i in positions])
        olds = engine().reusable(kepts)
        pairs = zip(stale, olds, strict=True)
        self._let_go_of([entry for entry, old in pairs if old is None and not entry.is_cast])
        engine().start(kepts, sources)
        with torch.profiler.record_function("amp_fx::refresh"):
            engine().finish(kepts, tuple(self._made(stale, sources, olds)))

    def start(self, weights: Weights) -> Any:
        """Notes what weights are now, for ``adopt``; None if that cannot be done."""
        with self.exclusive(waits=False) as is_first, making_values():
            if not is_first or not all(is_watchable(w) and watch(w.detach()) for w in weights):
                return None
            started = engine().Kept(tuple(weight.detach() for weight in weights), False)
            engine().start((started,), (weights,))
            return started

    def adopt(self, entry: Entry, value: Any, started: Any, positions: tuple[int, ...]) -> None:
        """Takes a value that was made after ``start``; it is stale if a write came since then."""
        weights = entry.weights()
        if weights is not None and entry.value is None:
            entry.kept.adopt(started, positions)
            engine().finish((entry.kept,), (value,))
            entry.made_bytes = _num_bytes(entry, value, weights)

    def _made(
        self, entries: Sequence[Entry], sources: Sequence[Weights], olds: Sequence[Any]
    ) -> list[Any]:
        """Makes values, in the memory of old ones that nobody reads; casts by one op, last.

        What is compiled is computed by one function for each set of weights.

        In a list, one pair whose strides differ would have every pair copied by itself.
        """
        makes_new = self.streams.are_several()
        values: list[Any] = []
        lows, highs = [], []
        together: dict[tuple[int, ...], tuple[Weights, list[Any], list[Any]]] = {}
        for entry, weights, old in zip(entries, sources, olds, strict=True):
            value: Any = None if makes_new else old
            spec: Any = entry.wanted
            if is_compiled(spec, weights):
                if value is None:
                    value = empty_values(spec, weights)
                    entry.made_bytes = _num_bytes(entry, value, weights)
                _, specs, own = together.setdefault(tuple(map(id, weights)), (weights, [], []))
                specs.append(spec)
                own.append(value)
            elif value is None or not entry.is_cast:
                value = self._made_anew(entry, weights, value)
            if entry.is_listed:
                lows.append(value)
                highs.append(weights[0])
            elif entry.is_cast:
                value.copy_(weights[0])
            values.append(value)
        for weights, specs, own in together.values():
            write_values(specs, tuple(map(_read_only, weights)), own)
        if lows:
            torch._foreach_copy_(lows, highs)
        return values

    def _made_anew(self, entry: Entry, weights: Weights, old: Any) -> Any:
        """A value, in the old one's memory if it fits; what is a cast is written later."""
        laid_out = None if entry.wanted.is_alias else entry.wanted.laid_out(weights[0])
        if laid_out is not None:
            (weight,), (dtype, strides) = weights, laid_out
            value = torch.empty_strided(weight.size(), strides, dtype=dtype, device=weight.device)
            is_small = weight.device.type == "cpu" or weight.numel() < MOST_OF_ONE_LAUNCH
            entry.is_cast, entry.is_listed = True, is_small and strides == weight.stride()
        else:
            value = make(entry.wanted, weights)
            value = value if old is None else _into(old, value)
        entry.made_bytes = _num_bytes(entry, value, weights)
        return value

    def drop(self, entry: Entry) -> None:
        """Forgets an entry and frees its value, wherever it is known."""
        entry.kept.value = None
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
        for identity in entry.key[0]:  # type: ignore[attr-defined]
            known = self._by_weight.get(identity, {})
            if known.get(entry.key) is entry:
                del known[entry.key]
            if not known:
                self._by_weight.pop(identity, None)
        for finalizer in entry.finalizers:
            finalizer.detach()
        self._let_go([entry])

    def _let_go_of(self, entries: Sequence[Entry]) -> None:
        """Drops stale values that only code of graphs holds, also from entries that share them."""
        dropped = set(entries)
        for entry in entries:
            value, known = entry.value, self._by_weight.get(entry.key[0][0], {})  # type: ignore[index]
            dropped.update(e for e in known.values() if value is not None and e.value is value)
        for entry in dropped:
            entry.kept.value = None
        self._let_go(dropped)

    def _let_go(self, entries: Iterable[Entry]) -> None:
        """Frees code of graphs that has values of these as constants which are no more."""
        for call in {call for entry in entries for call in entry.calls}:
            call.evict()

    def drop_unused(self) -> None:
        """Drops what no call wants any more."""
        for entry in list(self.entries.values()):
            if not entry.calls:
                self.drop(entry)

    def when_quiet(self, action: Callable[[], None]) -> None:
        """Does something to the entries: now, or once nobody is at work on them."""
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

    def _bury(self, ref: weakref.ref[Entry]) -> None:
        """Drops the value of a dead weight."""
        entry = ref()
        if entry is not None and entry.value is not None:
            self.drop(entry)

    def fit(self, entries: Sequence[Entry]) -> None:
        """Keeps within the limit: drops values that were never used, the new ones last."""
        limit = self.limit
        if limit is None or self.num_bytes <= limit:
            return
        if self._refused_at != len(self.entries):  # those that were used stay so
            self.shrink(limit, spared=entries, is_unused_only=True)
        for entry in sorted(entries, key=lambda entry: entry.kept.hits):
            if self.num_bytes > limit and entry.num_bytes:
                self.drop(entry)
        self._refused_at = len(self.entries)

    def shrink(
        self, num_bytes: int, *, spared: Iterable[Entry] = (), is_unused_only: bool = False
    ) -> None:
        """Drops the least used values until the rest take no more than so many bytes."""
        kept = set(spared)
        for entry in sorted(self.entries.values(), key=lambda entry: entry.kept.hits):
            if self.num_bytes <= num_bytes or (is_unused_only and entry.kept.hits > 0):
                break
            if entry.num_bytes and entry not in kept:
                self.drop(entry)


def _num_bytes_of(entries: Iterable[Entry]) -> int:
    """Bytes of some values; what several entries share counts once."""
    return sum({id(entry.value): entry.num_bytes for entry in list(entries)}.values())


def make(wanted: Wanted, weights: Weights) -> Any:
    """Makes a value of weights, which are read through aliases: reading is no write."""
    if wanted.is_alias:
        return _read_only(weights[0])
    return wanted.make(tuple(map(_read_only, weights)))


def _read_only(weight: torch.Tensor) -> torch.Tensor:
    """A weight without its gradient; an alias if it is plain."""
    is_plain = type(weight) in (torch.Tensor, torch.nn.Parameter)
    return engine().alias(weight.detach()) if is_plain else weight.detach()


def _fits(entry: Entry, weights: Weights) -> bool:
    """Whether casts of a weight that lies elsewhere now can be written to the same memory."""
    if not entry.is_cast:
        return False
    value, laid_out = entry.value, entry.wanted.laid_out(weights[0])
    place = value.dtype, value.stride(), value.size(), value.device
    return laid_out is not None and place == (*laid_out, weights[0].size(), weights[0].device)


def _into(old: Any, new: Any) -> Any:
    """Moves a value to where an older one lies, if both are laid out alike."""
    olds, news = (x if isinstance(x, tuple) else (x,) for x in (old, new))
    if len(olds) != len(news) or not all(map(_is_alike, olds, news)):
        return new
    for target, source in zip(olds, news, strict=True):
        target.copy_(source)
    return old


def _is_alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    is_strided = old.layout is new.layout is torch.strided
    if not is_strided or not torch.ops.aten.is_non_overlapping_and_dense.default(old):
        return False
    return (old.dtype, old.device, old.size(), old.stride()) == (
        new.dtype,
        new.device,
        new.size(),
        new.stride(),
    )


MOST_OF_ONE_LAUNCH = 320 * 65536
"""Elements that one launch of a CUDA kernel for two lists takes: 320 blocks of 65,536
(``ATen/native/cuda/MultiTensorApply.cuh``). A larger tensor is copied faster by itself."""


def _num_bytes(entry: Entry, value: Any, weights: Weights) -> int:
    """Bytes that a value takes, those of weights left out; packed ones are not told exactly.

    It asks no tensor for its storage: Python's object of it would look like another reader.
    """
    if entry.wanted.is_alias:
        return 0
    values = value if isinstance(value, tuple) else (value,)
    own = {storage_address_of(weight) for weight in weights if weight.numel()}
    dense = [v for v in values if v.layout is not torch.strided or storage_address_of(v) not in own]
    return sum(value.numel() * value.element_size() for value in dense)


def storage_address_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage, read without asking for a mutable pointer.

    Relies on ``torch._C._data_address``, which is private to torch.
    """
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return address


def described(name: str, owner: str, weight: torch.Tensor | None) -> str:
    """A weight in a message; None for one that died."""
    shape = () if weight is None else tuple(weight.shape)
    return f"{name} of {owner}, shape {shape},"


def watch(source: torch.Tensor) -> bool:
    """Watches a tensor for writes; returns False if it cannot."""
    return bool(engine().watch(source))


@functools.cache
def watch_swaps() -> None:
    """Drops what is kept of a tensor before it is swapped with another."""
    before_swaps(forget)


def forget(tensor: torch.Tensor) -> None:
    """Drops what is kept of one tensor, and with that all that refers to it weakly."""
    with STORE.exclusive():
        for entry in STORE.of_weight(tensor):
            STORE.drop(entry)


def tensors_of(model_or_tensor: torch.nn.Module | torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a module, or the tensor itself, each as this process has it."""
    if isinstance(model_or_tensor, torch.Tensor):
        return [part_of(model_or_tensor)]
    if isinstance(model_or_tensor, torch.nn.Module):
        parts = (*model_or_tensor.parameters(), *model_or_tensor.buffers())
        return [part_of(tensor) for tensor in parts]
    raise TypeError(
        f"invalidate takes a module, a tensor or None, not {type(model_or_tensor).__name__}"
    )


@contextlib.contextmanager
def making_values() -> Iterator[None]:
    """Switches off autograd, autocast and inference tensors, for where values are made."""
    with torch.inference_mode(mode=False), torch.no_grad(), no_autocast():
        yield


def same_bits(left: Any, right: Any) -> bool:
    """Whether two values, tensors or tuples of them, hold the same bits (NaN included)."""
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same_bits, left, right))
    if left.is_quantized:  # which has no NaN; torch compares scales, too
        return bool(torch.equal(left, right))
    if left.layout is not torch.strided:
        left, right = left.to_dense(), right.to_dense()
    if (left.dtype, left.size()) != (right.dtype, right.size()):
        return False
    return bool(torch.equal(_bits(left), _bits(right)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.contiguous().view(_BITS[plain.dtype.itemsize])


_BITS: Mapping[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


STORE = Store()
"""That of the process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=STORE.after_fork)
