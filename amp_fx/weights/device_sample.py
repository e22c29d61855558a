"""Compares kept copies on accelerators with their weights, an element each, without waiting.

A call starts a check behind all that is queued on its stream: one kernel looks at one element
of every copy, chosen anew, and sets flags, which are copied to the host. A later call finds
them there. A plan has one check under way at most: where the host runs far ahead, that is
fewer than one a call, never a longer queue.

Tables of addresses on the device tell the kernel where to look. They are good as long as no
copy was made or moved (``WeightCache.epoch``), and for the very tensors that they were made
for.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.weights.kept_copies import CACHE, key_of, making_copies
from amp_fx.weights.storage_watch import storage_address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from amp_fx.weights.kept_cast import Slot
    from amp_fx.weights.kept_copies import KeptCopy

    Tensors = Sequence[torch.Tensor]

log = logging.getLogger(__name__)

_SOURCES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LOWS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_NUMEL = 2**31
"""A place is chosen by 32 random bits, in 64-bit integers."""


class Device:
    """What checks need of an accelerator; tests put another in its place."""

    types: tuple[str, ...] = ("cuda", "xpu")

    def here(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes a device the current one, for launches."""
        return torch.accelerator.device_index(device.index)

    def stream(self, device: torch.device) -> int:
        """Identifies the current stream."""
        return int(torch.accelerator.current_stream(device).stream_id)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory for as many numbers, which copies need not wait for."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def record(self, device: torch.device) -> Any:
        """An event whose ``query`` says whether all that is queued now was done."""
        return torch.accelerator.current_stream(device).record_event()


@dataclasses.dataclass
class Part:
    """The copies of one kernel launch: those on one device, from one dtype to one other.

    Attributes:
        positions: Which of a plan's slots they are.
        device: Where they are.
        dtypes: That of the weights, and that of the copies.
        addresses: On the device, by row: of weights, of copies, and numbers of elements.
        flags: On the device, what differed so far; never reset.
        answer: The flags on the host, once copied.
        stream: The one that the tables were sent on.
    """

    positions: list[int]
    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype]
    addresses: torch.Tensor
    flags: torch.Tensor
    answer: torch.Tensor
    stream: int


@dataclasses.dataclass
class Table:
    """What the checks of one place need: the weights and copies that a call came with.

    Attributes:
        key: Identities of both.
        kept: Whose they are, one for each slot. Tensors themselves must not be referred to,
            not even weakly: a refresh writes in place where nobody holds the copy, and
            ``torch.utils.swap_tensors`` refuses tensors with weak references.
        parts: One for each launch.
    """

    key: tuple[int, ...]
    kept: list[weakref.ref[KeptCopy] | None]
    parts: list[Part]

    def sources(self) -> list[torch.Tensor | None]:
        """The weights, None for those that are gone."""
        found = [None if ref is None else ref() for ref in self.kept]
        return [None if kept is None else kept.source() for kept in found]


class DeviceSample:
    """The checks of one plan.

    Args:
        slots: Those of the plan.
        device: What there is of streams.
        has_kernel: Whether to use the Triton kernel, where there is one.
    """

    def __init__(
        self, slots: Sequence[Slot], device: Device | None = None, *, has_kernel: bool = True
    ) -> None:
        self.slots = tuple(slots)
        self.device = Device() if device is None else device
        self.has_kernel = has_kernel
        self.kernel: Callable[[], Callable[..., None] | None] = _kernel
        self.tables: dict[int, Table] = {}
        self._epoch = -1
        self._under_way: tuple[Table, list[Any]] | None = None
        self._latest = 0
        self._random = random.Random()  # not the user's, whose state is theirs
        self._turn = self._random.getrandbits(16)
        self._lock = threading.Lock()

    def read(self) -> list[torch.Tensor | None] | None:
        """What the latest check found, once it is there: the weights, if any copy differed."""
        if self._under_way is None or not self._lock.acquire(blocking=False):
            return None
        try:
            return self._read()
        finally:
            self._lock.release()

    def _read(self) -> list[torch.Tensor | None] | None:
        if self._under_way is None:
            return None
        table, events = self._under_way
        if not all(event.query() for event in events):
            return None
        self._under_way = None
        if not any(part.answer.any() for part in table.parts):
            return None
        self.tables.clear()  # and with them their flags
        return table.sources()

    def start(self, sources: Tensors, lows: Tensors) -> None:
        """Queues a check, unless one is under way.

        Args:
            sources: The weights of a call that found all copies fresh, one for each slot.
            lows: Their copies.
        """
        is_turn = self._is_turn_of(id(sources[0]))
        if self._under_way is not None or not is_turn or not self._lock.acquire(blocking=False):
            return
        try:
            if self._under_way is None:
                self._start(sources, lows)
        finally:
            self._lock.release()

    def _start(self, sources: Tensors, lows: Tensors) -> None:
        key = (*map(id, sources), *map(id, lows))
        with torch._C._profiler._RecordFunctionFast("amp_fx::sample"), making_copies():
            table = self._table(key, sources, lows)
            if CACHE.streams.are_several(part.device for part in table.parts):
                CACHE.streams.hold(sources)  # perhaps nothing else here reads them on this stream
            events = [self._check(part, sources, lows) for part in table.parts]
        if events:
            self._under_way = table, events

    def _is_turn_of(self, place: int) -> bool:
        """Whether a call may start a check: by chance where one graph serves many layers.

        The first call after a check was read would always be of the same layers, if checks
        took as long as a round of all layers does.
        """
        is_alone = self._latest in (0, place)
        self._latest = place
        return is_alone or self._random.random() < 0.5

    def _table(self, key: tuple[int, ...], sources: Tensors, lows: Tensors) -> Table:
        epoch = CACHE.epoch
        if epoch != self._epoch:
            self.tables.clear()
            self._epoch = epoch
        table = self.tables.get(key[0])
        if table is None or table.key != key or not self._is_on_streams(table):
            table = Table(key, self._kept(sources), self._parts(sources, lows))
            self.tables[key[0]] = table
        return table

    def _is_on_streams(self, table: Table) -> bool:
        """Whether the current streams are those that the tables were sent on."""
        return all(part.stream == self.device.stream(part.device) for part in table.parts)

    def _kept(self, sources: Tensors) -> list[weakref.ref[KeptCopy] | None]:
        keys = [key_of(s, t) for s, t in zip(self.slots, sources, strict=True)]
        return [weakref.ref(CACHE.copies[k]) if k in CACHE.copies else None for k in keys]

    def _parts(self, sources: Tensors, lows: Tensors) -> list[Part]:
        groups: dict[Any, list[int]] = {}
        for i, (source, low) in enumerate(zip(sources, lows, strict=True)):
            if not self._is_alias(i) and self._is_comparable(source, low):
                groups.setdefault((source.device, source.dtype, low.dtype), []).append(i)
        return [self._part(positions, sources, lows) for positions in groups.values()]

    def _is_alias(self, position: int) -> bool:
        return self.slots[position].is_alias

    def _is_comparable(self, source: torch.Tensor, low: torch.Tensor) -> bool:
        """Whether elements of both lie side by side: copies are dense, so equal strides do."""
        return (
            source.device.type in self.device.types
            and source.dtype in _SOURCES
            and low.dtype in _LOWS
            and source.stride() == low.stride()
            and 0 < source.numel() < _MAX_NUMEL
        )

    def _part(self, positions: list[int], sources: Tensors, lows: Tensors) -> Part:
        source, low = sources[positions[0]], lows[positions[0]]
        rows = [
            [_address_of(sources[i]) for i in positions],
            [_address_of(lows[i]) for i in positions],
            [sources[i].numel() for i in positions],
        ]
        table = torch.tensor(rows, dtype=torch.int64)
        addresses = self.device.pinned(table).copy_(table).to(source.device, non_blocking=True)
        flags = torch.zeros(len(positions), dtype=torch.int32, device=source.device)
        answer = self.device.pinned(flags)
        dtypes = source.dtype, low.dtype
        stream = self.device.stream(source.device)
        return Part(positions, source.device, dtypes, addresses, flags, answer, stream)

    def _check(self, part: Part, sources: Tensors, lows: Tensors) -> Any:
        """Queues a comparison and the way of its flags to the host; the event behind them."""
        with self.device.here(part.device):
            launch = self.kernel() if self.has_kernel else None
            if launch is None or not self._is_launched(launch, part):
                self._compare_two(part, sources, lows)
            part.answer.copy_(part.flags, non_blocking=True)
            return self.device.record(part.device)

    def _is_launched(self, launch: Callable[..., None], part: Part) -> bool:
        try:
            launch(part.addresses, part.flags, self._random.getrandbits(31), *part.dtypes)
        except Exception:  # Triton wants a compiler and a driver that it knows
            log.debug("samples are taken by ops of torch: Triton failed", exc_info=True)
            self.has_kernel = False
        return self.has_kernel

    def _compare_two(self, part: Part, sources: Tensors, lows: Tensors) -> None:
        """The same by ops of torch, of which each copy takes a few: for two, taken in turn."""
        count = len(part.positions)
        for turn in {self._turn % count, (self._turn + 1) % count}:
            source, low = sources[part.positions[turn]], lows[part.positions[turn]]
            place = self._random.randrange(source.numel())
            value, kept = _element(source, place).to(low.dtype), _element(low, place)
            are_nan = value.isnan() & kept.isnan()
            part.flags[turn].logical_or_((value != kept) & ~are_nan)
        self._turn += 2


def _address_of(tensor: torch.Tensor) -> int:
    """Where a tensor's first element is; its storage takes nobody for somebody who writes."""
    address: int = storage_address_of(tensor) + tensor.storage_offset() * tensor.element_size()
    return address


def _element(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """The element at a place in the memory of a dense tensor."""
    return tensor.detach().as_strided((), (), tensor.storage_offset() + place)


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """``sample_kernel.launch``; None where triton is not installed."""
    try:
        from amp_fx.weights.sample_kernel import launch
    except ImportError:
        return None
    return launch
