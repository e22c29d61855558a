"""Compares some elements of weights on accelerators with what they were, without waiting.

When a value is made, some elements of each of its weights are remembered on the device
(``remember``). Now and then a call of a graph queues one comparison of all its weights on its
stream; a later call finds the answer on the host. On the CPU ``csrc/watch.cpp`` does the same
for one element per call.

A comparison is due in each of the first few calls with some weights, then in every 16th, as soon
as the answer of the one before is there. It finds any write of a whole weight, and of a 64th of a
weight that lies in one piece. It finds other writes if they happen to change a remembered element:
there are 64 of each weight or more, at equal distances. Weights may have gaps or be expanded.

An answer counts only for values that were not made again meanwhile and are fresh when it is read.
So no write that a signal told of is ever taken for one that was not seen. ``STORE.exclusive``
guards all that is done here but ``DeviceSample.read``.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from amp_fx.devices.host_copy import HostCopy
from amp_fx.weights.store import STORE, making_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amp_fx.weights.store import Entry, Weights

LEAST_SAMPLED = 64
"""Elements that are remembered of each weight at least; all of a dense one with fewer than 128."""

MOST_SAMPLED = 4 * LEAST_SAMPLED
"""No more are remembered: distances are whole numbers, of up to twice as many elements."""

CALLS_BETWEEN = 16
"""Calls from one comparison to the next, once the first few calls compared."""

FIRST_CALLS = 4


class Place(tuple["Entry", ...]):
    """The entries of one set of weights that a graph is called with."""

    num_calls = 0
    due = 1

    def __init__(self, _: Iterable[Entry]) -> None:
        self.answers: defaultdict[Any, HostCopy] = defaultdict(HostCopy)

    def room(self, device: torch.device, dtype: torch.dtype) -> int:
        """How many elements comparisons may have: a later call must not pin more memory."""
        weights = [weight for entry in self for weight in entry.weights() or ()]
        alike = [w for w in weights if (w.device, w.dtype) == (device, dtype)]
        return sum(min(weight.numel(), MOST_SAMPLED) for weight in alike)

    def is_due(self) -> bool:
        """Counts a call; returns whether it is to compare."""
        self.num_calls += 1
        is_waiting = any(answer.is_under_way for answer in self.answers.values())
        if is_waiting or self.num_calls < self.due:
            return False
        self.due = self.num_calls + (1 if self.num_calls < FIRST_CALLS else CALLS_BETWEEN)
        return True


class _Grid(NamedTuple):
    """Elements of a strided tensor at equal distances in each dimension."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @classmethod
    def over(cls, tensor: torch.Tensor) -> _Grid:
        """Chooses at least ``LEAST_SAMPLED`` of the distinct elements, at most ``MOST_SAMPLED``.

        Outer dimensions are sampled first. A part in one piece, of a 64th of all, has one of them.
        """
        sizes: list[int] = []
        strides: list[int] = []
        start, least = 0, LEAST_SAMPLED
        for stride, size in _distinct_elements(tensor):
            spread = 1 + _random.random() if not sizes else 1
            step = max(1, int(size / least / spread))
            first = _random.randrange(step)
            sizes.append(len(range(first, size, step)))
            strides.append(stride * step)
            start += stride * first
            least = -(-least // sizes[-1])
        return cls(tuple(sizes), tuple(strides), start)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reads the elements; one dimension."""
        start = tensor.storage_offset() + self.start
        return tensor.as_strided(self.sizes, self.strides, start).reshape(-1)


def _distinct_elements(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Returns strides and sizes of the dimensions, by address, neighbours that lie as one merged.

    Expanded dimensions are left out. A dense tensor has one dimension, whatever its layout.
    """
    pairs = zip(tensor.stride(), tensor.size(), strict=True)
    merged: list[tuple[int, int]] = []
    for stride, size in sorted((p for p in pairs if p[0] and p[1] > 1), reverse=True):
        if merged and merged[-1][0] == stride * size:
            merged[-1] = stride, merged[-1][1] * size
        else:
            merged.append((stride, size))
    return merged


class _Some(NamedTuple):
    """Some elements of one weight of an entry, as they were when its value was made."""

    position: int
    grid: _Grid
    then: torch.Tensor

    def now(self, weights: Weights) -> torch.Tensor:
        """Returns the samples as they are now."""
        return self.grid.of(weights[self.position])


_remembered: weakref.WeakKeyDictionary[Entry, tuple[int, list[_Some]]]
_remembered = weakref.WeakKeyDictionary()
"""By entry, how often its value had been made, and the elements of its weights."""

_random = random.Random()  # not the user's, whose state is theirs


def remember(entries: Iterable[Entry]) -> None:
    """Remembers elements of the weights of fresh values, unless that was done for these values.

    It reads the weights on the current streams, behind what made the values.
    """
    with making_values():
        groups: defaultdict[Any, list[tuple[list[_Some], int, _Grid, torch.Tensor]]]
        groups = defaultdict(list)
        for entry in entries:
            weights = None if _is_remembered(entry) else _fresh_weights(entry)
            if weights is None:
                continue
            found: list[_Some] = []
            for i, weight in enumerate(weights):
                if _is_comparable(weight):
                    grid = _Grid.over(weight)
                    some = found, i, grid, grid.of(weight)
                    groups[weight.device, weight.dtype].append(some)
            _remembered[entry] = entry.kept.made, found
        for group in groups.values():
            now = [elements for *_, elements in group]
            then = torch.cat(now).split_with_sizes([each.numel() for each in now])
            for (found, i, grid, _), elements in zip(group, then, strict=True):
                found.append(_Some(i, grid, elements))


def remember_again(entries: Iterable[Entry]) -> None:
    """Remembers elements again of those weights of which some were, if values were made since."""
    remember([entry for entry in entries if entry in _remembered])


def _is_remembered(entry: Entry) -> bool:
    made, _ = _remembered.get(entry, (-1, ()))
    return bool(made == entry.kept.made)


class DeviceSample:
    """The comparisons of one graph, whatever weights it is called with."""

    def __init__(self) -> None:
        self._under_way: deque[_Comparison] = deque()
        self._reading = threading.Lock()

    def start(self, place: Place) -> None:
        """Queues a comparison of the weights of all values of a place that are fresh."""
        with torch.profiler.record_function("amp_fx::sample"), making_values():
            groups: defaultdict[Any, list[tuple[Entry, _Some, Weights]]] = defaultdict(list)
            for entry in place:
                weights = _fresh_weights(entry)
                if weights is not None and _is_remembered(entry):
                    for some in _remembered[entry][1]:
                        weight = weights[some.position]
                        groups[weight.device, weight.dtype].append((entry, some, weights))
            for key, sampled in groups.items():
                comparison = _Comparison(place.answers[key], sampled, place.room(*key))
                self._under_way.append(comparison)

    def read(self) -> list[tuple[str, torch.Tensor]]:
        """The weights that comparisons found changed, by name, as far as these are done."""
        if not self._under_way or not self._reading.acquire(blocking=False):
            return []
        try:
            found = []
            while self._under_way and (answer := self._under_way[0].answer.take()) is not None:
                found += self._under_way.popleft().changed(answer)
            return found
        finally:
            self._reading.release()


class _Comparison:
    """A comparison of remembered elements on one device, of one dtype.

    It refers to no weight: ``torch.utils.swap_tensors`` refuses tensors with weak references.

    Args:
        answer: Takes the answer to the host.
        sampled: The elements, each with its entry and the weights of that.
        room: How many elements a later comparison may have.
    """

    def __init__(
        self, answer: HostCopy, sampled: Sequence[tuple[Entry, _Some, Weights]], room: int
    ) -> None:
        self.answer = answer
        self._of = [(weakref.ref(e), e.kept.made, some.position) for e, some, _ in sampled]
        self._lengths = [some.then.numel() for _, some, _ in sampled]
        then = [some.then for _, some, _ in sampled]
        STORE.streams.hold([*(weights[some.position] for _, some, weights in sampled), *then])
        bits = _BITS[then[0].dtype]
        now = torch.cat([some.now(weights) for _, some, weights in sampled])
        self.answer.start(now.view(bits) != torch.cat(then).view(bits), room=room)

    def changed(self, answer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The weights with an element that differs and that no signal told of, by name."""
        found: list[tuple[str, torch.Tensor]] = []
        if not answer.any():
            return found
        answers = answer.split_with_sizes(self._lengths)
        for (ref, made, position), differs in zip(self._of, answers, strict=True):
            entry = ref()
            if entry is not None and differs.any() and entry.kept.made == made:
                weights = _fresh_weights(entry)
                if weights is not None:
                    found.append((entry.wanted.names[position], weights[position]))
        return found


def _fresh_weights(entry: Entry) -> Weights | None:
    """The weights of a fresh value, where they lie now; None if it is stale or the weights' own."""
    weights = None if entry.wanted.is_alias else entry.weights()
    # Another thread may give a weight other data meanwhile.
    here = None if weights is None else tuple(weight.detach() for weight in weights)
    return here if here is not None and entry.kept.is_fresh(here) else None


def _is_comparable(weight: torch.Tensor) -> bool:
    """Returns True if a weight has elements, of a dtype whose bits can be compared."""
    return weight.dtype in _BITS and weight.numel() > 0


_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
