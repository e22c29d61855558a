"""``native/watch.cpp`` in Python, for where that cannot be built: slower, and as right.

Storages are watched by making them copy-on-write (``storage_watch``), which no other thread
may be near: while one might be, weights are cast for every call.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.weights.storage_watch import (
    StorageWatch,
    is_armed,
    storage_address_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

has_hook = False
"""Whether any thread may watch a storage at any time."""

WATCH = StorageWatch()

_calls: dict[int, int] = {}
"""How many calls each thread is inside of."""


def watch(tensor: torch.Tensor) -> bool:
    """Watches a tensor's storage; False where that is impossible, or not safe now."""
    return other_threads_wait() and WATCH.generation(tensor) is not None


def watched(tensor: torch.Tensor) -> bool:
    """Whether a write would be noticed, and none was."""
    return bool(is_armed(tensor))


def unwatch(tensor: torch.Tensor) -> None:
    """Watches a tensor's storage no longer."""
    if is_armed(tensor):
        tensor.data_ptr()  # asks for a mutable pointer, which disarms


def mark(tensors: Iterable[torch.Tensor]) -> None:
    """Says that tensors were written."""
    for tensor in tensors:
        WATCH.raise_generation(tensor)


def stands_for(whole: torch.Tensor, part: torch.Tensor) -> None:
    """What is said of a DTensor is said of its part in this process."""
    WATCH.share_record(whole, part)


def alias(tensor: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG001
    """The same bytes in a storage of its own: not without C++, which shares the version too."""
    return None


def watch_list_ops() -> None:
    """Sees ops that write lists of tensors, which on accelerators ask no storage."""
    if _list_ops:
        return
    library = torch.library.Library("aten", "IMPL", "ADInplaceOrView")  # type: ignore[no-untyped-call]
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace != "aten" or not rest.startswith(("_foreach", "_fused", "_amp_foreach")):
            continue
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        written = [a.name for a in op._schema.arguments if _is_written_list(a)]
        if written:
            kernel = _list_kernel(op, written)
            library.impl(op, kernel, with_keyset=True)  # type: ignore[no-untyped-call]
            _list_ops.append(op)
    _libraries.append(library)


_list_ops: list[Any] = []
_libraries: list[Any] = []


def watched_list_ops() -> list[str]:
    """The names of the ops that ``watch_list_ops`` sees."""
    return [str(op).replace(".default", "").replace("aten.", "aten::", 1) for op in _list_ops]


def _is_written_list(argument: Any) -> bool:
    is_written = argument.alias_info is not None and argument.alias_info.is_write
    return is_written and isinstance(argument.type, torch._C.ListType)


def _list_kernel(op: Any, written: Sequence[str]) -> Any:
    places = [i for i, a in enumerate(op._schema.arguments) if a.name in written]
    below: Any = torch._C._after_ADInplaceOrView_keyset

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for place in places:
            mark(args[place] if place < len(args) else ())
        return op.redispatch(keyset & below, *args, **kwargs)

    return kernel


class Copy:
    """One kept copy of a weight, and what the weight was when it was made.

    Args:
        low: The copy.
        source: The weight.
        is_alias: Whether it is the weight's own bytes; never here.
    """

    def __init__(self, low: torch.Tensor, source: torch.Tensor, is_alias: bool) -> None:
        assert not is_alias
        self.low: Any = low
        self.hits = 0
        self.refreshes = 0
        self.is_suspect = False
        self.is_distrusted = False
        self.bind(source)

    def bind(self, source: torch.Tensor) -> None:
        """Says where the weight lies now; implies ``invalidate``."""
        self.place = _place_of(source)
        self.record = WATCH.record(source)
        self.seen: tuple[int, int] | None = None
        self.canary: tuple[Any, int] | None = None

    def drop(self) -> None:
        """Lets go of the low tensor; no look finds the copy again."""
        self.low = None

    def invalidate(self) -> None:
        """Has it made again before its next use."""
        self.seen = None

    def distrust(self) -> None:
        """Has it made again before every use."""
        self.is_distrusted = True

    def lies_where(self, source: torch.Tensor) -> bool:
        """Whether a weight is where the copy's was."""
        return self.low is not None and _place_of(source) == self.place

    def is_fresh(self, source: torch.Tensor) -> bool:
        """Whether no signal tells of a write."""
        return (
            not self.is_distrusted
            and self.record is not None
            and self.seen == (self.record.generation, _version_of(source))
            and is_armed(source)
        )

    def choose_canary(self, source: torch.Tensor) -> None:
        """Remembers the bits of one element, chosen anew."""
        kind = _UNSIGNED.get(source.element_size())
        if source.device.type != "cpu" or kind is None or source.numel() == 0:
            return
        index = random.randrange(source.numel())
        if not source.is_contiguous():
            index = 0
        offset = (source.storage_offset() + index) * source.element_size()
        element = kind.from_address(storage_address_of(source) + offset)
        self.canary = element, element.value

    def agrees(self) -> bool:
        """Whether the remembered element has the bits that it had."""
        self.is_suspect = self.canary is not None and self.canary[0].value != self.canary[1]
        return not self.is_suspect

    def agrees_somewhere(self, source: torch.Tensor) -> bool:
        """Whether one element, chosen anew, is the weight's, rounded."""
        low = self.low
        if source.device.type != "cpu" or source.stride() != low.stride() or not source.numel():
            return True
        flat = [t.detach().as_strided((t.numel(),), (1,)) for t in (source, low)]
        index = random.randrange(source.numel())
        value, kept = flat[0][index].to(low.dtype), flat[1][index]
        self.is_suspect = not torch.allclose(value, kept, rtol=0, atol=0, equal_nan=True)
        return not self.is_suspect


_UNSIGNED: dict[int, Any] = {2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


class Look:
    """The kept casts of one graph.

    Args:
        sources: Positions of the weights among the graph's inputs, one for each copy.
        passed: Positions of the inputs that the graph takes besides the copies.
        is_pure: Whether the graph writes no weight; of no use here.
        samples: Whether to compare an element of every copy.
    """

    def __init__(
        self,
        sources: tuple[int, ...],
        passed: tuple[int, ...],
        is_pure: bool,  # noqa: ARG002
        samples: bool,
    ) -> None:
        self.sources = sources
        self.passed = passed
        self.samples = samples
        self.found_mismatch = False
        self.places: list[tuple[Copy, ...]] = []

    def enter(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The inputs of a call that finds all fresh, or None."""
        self.begin()  # first: from here on nobody writes to a copy
        inputs = self._fresh_inputs(args)
        if inputs is None:
            self.leave()
        return inputs

    def _fresh_inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self.found_mismatch = False
        copies = self._find(args)
        if copies is None:
            return None
        self.found_mismatch = self.samples and not self._samples_agree(copies, args)
        if self.found_mismatch or not self._all_fresh(copies, args):
            return None
        inputs = self._inputs(copies, args)
        if any(low is None for low in inputs[len(self.passed) :]):
            return None  # dropped by another thread
        for copy in copies:
            copy.hits += 1
        return inputs

    def begin(self) -> None:
        """What a successful ``enter`` does besides."""
        thread = threading.get_ident()
        _calls[thread] = _calls.get(thread, 0) + 1

    def leave(self) -> None:
        """Ends what ``enter`` or ``begin`` began."""
        thread = threading.get_ident()
        _calls[thread] -= 1
        if not _calls[thread]:
            del _calls[thread]

    def refresh(
        self, args: tuple[Any, ...], may_arm: bool, makes_new: bool
    ) -> tuple[tuple[Any, ...], int] | None:
        """Makes stale copies again; None where the place is not known."""
        copies = self._find(args)
        if copies is None:
            return None
        sources = [args[i] for i in self.sources]
        if may_arm:
            for source in sources:
                WATCH.generation(source)
        stale: dict[int, tuple[Copy, torch.Tensor, Any]] = {}
        for copy, source in zip(copies, sources, strict=True):
            if copy.is_fresh(source):
                copy.hits += 1
            elif id(copy) not in stale:
                stale[id(copy)] = copy, source, _seen(copy, source)
        _make_again(list(stale.values()), makes_new)
        return self._inputs(copies, args), len(stale)

    def remember(self, copies: tuple[Copy, ...]) -> None:
        """Takes the copies of a new place."""
        alive = [p for p in self.places if p != copies and all(c.low is not None for c in p)]
        self.places = [*alive[-_MAX_PLACES:], copies]

    def forget(self) -> None:
        """Knows no place any more."""
        self.places = []

    def _find(self, args: Sequence[Any]) -> tuple[Copy, ...] | None:
        sources = [args[i] for i in self.sources]
        if not all(type(source) in (torch.Tensor, torch.nn.Parameter) for source in sources):
            return None
        for place in self.places:
            if all(copy.lies_where(s) for copy, s in zip(place, sources, strict=True)):
                return place
        return None

    def _all_fresh(self, copies: Sequence[Copy], args: Sequence[Any]) -> bool:
        return all(c.is_fresh(args[i]) for c, i in zip(copies, self.sources, strict=True))

    def _samples_agree(self, copies: Sequence[Copy], args: Sequence[Any]) -> bool:
        pairs = zip(copies, [args[i] for i in self.sources], strict=True)
        fresh = [(copy, source) for copy, source in pairs if copy.is_fresh(source)]
        agree = not [copy for copy, _ in fresh if not copy.agrees()]
        if agree and fresh:
            copy, source = random.choice(fresh)
            copy.choose_canary(source)
            agree = copy.agrees_somewhere(source)
        return agree

    def _inputs(self, copies: Sequence[Copy], args: Sequence[Any]) -> tuple[Any, ...]:
        return (*[args[i] for i in self.passed], *[copy.low for copy in copies])


_MAX_PLACES = 255


def _place_of(source: torch.Tensor) -> tuple[Any, ...]:
    return (
        source.untyped_storage()._cdata,
        storage_address_of(source),
        source.storage_offset(),
        source.dtype,
        source.size(),
        source.stride(),
    )


def _version_of(source: torch.Tensor) -> int:
    return 0 if source.is_inference() else source._version


def _seen(copy: Copy, source: torch.Tensor) -> tuple[int, int] | None:
    """What the weight is now; None if that cannot be told from what it will be."""
    copy.record = WATCH.record(source)
    if copy.record is None or not is_armed(source):
        return None
    return copy.record.generation, _version_of(source)


MOST_OF_ONE_LAUNCH = 320 * 65536
"""Elements: ``kMostOfOneLaunch`` of ``watch.cpp``."""


def _copy_all(lows: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """As ``copy_all`` of ``watch.cpp``: one list, but for what would make it slower or longer."""
    alike: list[tuple[torch.Tensor, torch.Tensor]] = []
    for low, source in zip(lows, sources, strict=True):
        fits = low.is_cpu or low.numel() < MOST_OF_ONE_LAUNCH
        if fits and low.stride() == source.stride():
            alike.append((low, source))
        else:
            low.copy_(source)
    if alike:
        torch._foreach_copy_([low for low, _ in alike], [source for _, source in alike])


def _make_again(stale: list[tuple[Copy, torch.Tensor, Any]], makes_new: bool) -> None:
    if not stale:
        return
    lows = [torch.empty_like(c.low) if makes_new or _is_used(c) else c.low for c, _, _ in stale]
    with torch.profiler.record_function("amp_fx::refresh"):
        _copy_all(lows, [s.detach() for _, s, _ in stale])
    for (copy, source, seen), low in zip(stale, lows, strict=True):
        if copy.low is None:  # dropped meanwhile
            continue
        copy.low = low
        copy.refreshes += 1
        copy.is_suspect = False
        copy.seen = seen
        copy.choose_canary(source)


def _is_used(copy: Copy) -> bool:
    """Whether somebody may be reading a copy, or holds it in Python.

    AOTAutograd keeps what needs no version check for its backward as Python objects.
    """
    return sys.getrefcount(copy.low) > _UNSHARED_REFERENCES or _is_in_use(copy.low)


_UNSHARED_REFERENCES = 2
"""The copy's own, and that of the argument of ``getrefcount``."""


def _is_in_use(low: torch.Tensor) -> bool:
    """Whether somebody may be reading a copy: another call, or a backward that saved it.

    Relies on ``Tensor._use_count``, which a saved tensor raises, and on
    ``torch._C._storage_Use_Count``, which a view raises, counting the storage object that
    is made here too.
    """
    if _calls or low._use_count() > 1:  # type: ignore[attr-defined]
        return True
    storage = low.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > _UNSHARED_USE_COUNT


_UNSHARED_USE_COUNT = 2


def other_threads_wait() -> bool:
    """Whether every other Python thread is known to wait for something.

    A thread whose innermost frame is none of ``_WAITING`` may be inside an op of torch.
    """
    if threading.active_count() == 1:
        return True
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that knows itself keeps all it knows alive
    return all(map(_is_waiting, frames.values()))


def _is_waiting(frame: Any) -> bool:
    path = frame.f_code.co_filename.replace("\\", "/")
    return any(path.endswith(f) and frame.f_code.co_name == n for f, n in _WAITING)


_WAITING = (
    ("/threading.py", "wait"),
    ("/threading.py", "_wait_for_tstate_lock"),
    ("/threading.py", "join"),
    ("/selectors.py", "select"),
    ("/concurrent/futures/thread.py", "_worker"),
    ("/multiprocessing/connection.py", "_recv"),
    ("/_inductor/compile_worker/subproc_pool.py", "_read_thread"),
)
"""Files and functions in which a thread can only wait, or start what has a frame of its own."""
