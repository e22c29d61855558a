"""Detects writes without a signal on accelerators by sampling weights asynchronously.

When a value is computed, some elements of each of its weights are copied on the device
(``remember``). Some later calls of a graph start a comparison of all its weights on their stream,
and a call after that reads the result on the host. On the CPU, ``csrc/watch.cpp`` compares one
element per call.

Each of the first calls with a set of weights starts a comparison, then every 16th call, unless one
is still running. A comparison detects every write of a whole weight, and of a contiguous 64th of
one. It detects other writes if they change a sampled element: at least 64 of each weight are
sampled, at equal distances. Weights may be strided or expanded.

A result counts only for values that were not refreshed since and are fresh when it is read, so that
a write with a signal is never reported. ``STORE.locked`` protects everything here except
``DeviceSample.read``.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from amp_fx.devices.host_copy import HostCopy
from amp_fx.weights.entry import computing_values
from amp_fx.weights.store import STORE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amp_fx.weights.entry import Entry, Weights

MIN_SAMPLED = 64
"""Minimum of sampled elements per weight; dense weights below 128 elements are sampled whole."""

MAX_SAMPLED = 4 * MIN_SAMPLED
"""Maximum number: distances are whole numbers."""

CALLS_BETWEEN = 16
"""Calls between two comparisons after the first calls."""

FIRST_CALLS = 4


class SampledEntries(tuple["Entry", ...]):
    """The entries for one set of weights of a graph, with the state of their comparisons."""

    num_calls = 0
    due = 1

    def __init__(self, _: Iterable[Entry]) -> None:
        self.answers: defaultdict[Any, HostCopy] = defaultdict(HostCopy)

    def room(self, device: torch.device, dtype: torch.dtype) -> int:
        """Returns the most elements of a comparison: later calls must not pin more memory."""
        weights = [weight for entry in self for weight in entry.weights() or ()]
        alike = [w for w in weights if (w.device, w.dtype) == (device, dtype)]
        return sum(min(weight.numel(), MAX_SAMPLED) for weight in alike)

    def is_due(self) -> bool:
        """Counts a call; returns True if it has to start a comparison."""
        self.num_calls += 1
        is_running = any(answer.is_under_way for answer in self.answers.values())
        if is_running or self.num_calls < self.due:
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
        """Chooses at least ``MIN_SAMPLED`` of the distinct elements, at most ``MAX_SAMPLED``.

        Outer dimensions are sampled first. Every contiguous 64th of the elements contains a sample.
        """
        sizes: list[int] = []
        strides: list[int] = []
        start, least = 0, MIN_SAMPLED
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
    """Returns strides and sizes of the dimensions in order of address.

    Expanded dimensions are omitted, and adjacent ones are merged: a dense tensor has one dimension
    in any layout.
    """
    pairs = zip(tensor.stride(), tensor.size(), strict=True)
    merged: list[tuple[int, int]] = []
    for stride, size in sorted((p for p in pairs if p[0] and p[1] > 1), reverse=True):
        if merged and merged[-1][0] == stride * size:
            merged[-1] = stride, merged[-1][1] * size
        else:
            merged.append((stride, size))
    return merged


class _WeightSample(NamedTuple):
    """Elements of one weight of an entry at the time when its value was computed."""

    position: int
    grid: _Grid
    then: torch.Tensor

    def now(self, weights: Weights) -> torch.Tensor:
        """Returns the elements as they are now."""
        return self.grid.of(weights[self.position])


_samples: weakref.WeakKeyDictionary[Entry, tuple[int, list[_WeightSample]]]
_samples = weakref.WeakKeyDictionary()
"""For each entry, the number of computations and the samples of its weights at that time."""

_random = random.Random()  # leaves the user's random state alone


def remember(entries: Iterable[Entry]) -> None:
    """Samples the weights of fresh values that have no samples yet.

    It reads the weights on the current streams, after the computation of the values.
    """
    with computing_values():
        groups: defaultdict[Any, list[tuple[list[_WeightSample], int, _Grid, torch.Tensor]]]
        groups = defaultdict(list)
        for entry in entries:
            weights = None if _has_sample(entry) else _fresh_weights(entry)
            if weights is None:
                continue
            found: list[_WeightSample] = []
            for i, weight in enumerate(weights):
                if _is_comparable(weight):
                    grid = _Grid.over(weight)
                    some = found, i, grid, grid.of(weight)
                    groups[weight.device, weight.dtype].append(some)
            _samples[entry] = entry.slot.made, found
        for group in groups.values():
            now = [elements for *_, elements in group]
            then = torch.cat(now).split_with_sizes([each.numel() for each in now])
            for (found, i, grid, _), elements in zip(group, then, strict=True):
                found.append(_WeightSample(i, grid, elements))


def remember_again(entries: Iterable[Entry]) -> None:
    """Samples weights again that were sampled before, if their values were recomputed since."""
    remember([entry for entry in entries if entry in _samples])


def _has_sample(entry: Entry) -> bool:
    made, _ = _samples.get(entry, (-1, ()))
    return bool(made == entry.slot.made)


class DeviceSample:
    """The comparisons of one graph, for all sets of weights."""

    def __init__(self) -> None:
        self._under_way: deque[_Comparison] = deque()
        self._reading = threading.Lock()

    def start(self, entries: SampledEntries) -> None:
        """Starts a comparison of the weights of all fresh values."""
        with torch.profiler.record_function("amp_fx::sample"), computing_values():
            groups: defaultdict[Any, list[tuple[Entry, _WeightSample, Weights]]] = defaultdict(list)
            for entry in entries:
                weights = _fresh_weights(entry)
                if weights is not None and _has_sample(entry):
                    for some in _samples[entry][1]:
                        weight = weights[some.position]
                        groups[weight.device, weight.dtype].append((entry, some, weights))
            for key, sampled in groups.items():
                comparison = _Comparison(entries.answers[key], sampled, entries.room(*key))
                self._under_way.append(comparison)

    def read(self) -> list[tuple[str, torch.Tensor]]:
        """Returns names and tensors of changed weights, from comparisons that have finished."""
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
    """A comparison of samples on one device, of one dtype.

    It has no references to weights, which ``torch.utils.swap_tensors`` would reject.

    Args:
        answer: Copies the result to the host.
        sampled: The samples, each with its entry and the weights of the entry.
        room: The most elements that a later comparison may have.
    """

    def __init__(
        self, answer: HostCopy, sampled: Sequence[tuple[Entry, _WeightSample, Weights]], room: int
    ) -> None:
        self.answer = answer
        self._of = [(weakref.ref(e), e.slot.made, some.position) for e, some, _ in sampled]
        self._lengths = [some.then.numel() for _, some, _ in sampled]
        then = [some.then for _, some, _ in sampled]
        STORE.streams.hold([*(weights[some.position] for _, some, weights in sampled), *then])
        bits = _BITS[then[0].dtype]
        now = torch.cat([some.now(weights) for _, some, weights in sampled])
        self.answer.start(now.view(bits) != torch.cat(then).view(bits), room=room)

    def changed(self, answer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Returns names and tensors of weights with a difference that no signal explains."""
        found: list[tuple[str, torch.Tensor]] = []
        if not answer.any():
            return found
        answers = answer.split_with_sizes(self._lengths)
        for (ref, made, position), differs in zip(self._of, answers, strict=True):
            entry = ref()
            if entry is not None and differs.any() and entry.slot.made == made:
                weights = _fresh_weights(entry)
                if weights is not None:
                    found.append((entry.spec.names[position], weights[position]))
        return found


def _fresh_weights(entry: Entry) -> Weights | None:
    """Returns the weights of a fresh value; None if it is stale, or an alias of its weight."""
    weights = None if entry.spec.is_alias else entry.weights()
    # Another thread may assign other data to a weight: read its memory once.
    current = None if weights is None else tuple(weight.detach() for weight in weights)
    return current if current is not None and entry.slot.is_fresh(current) else None


def _is_comparable(weight: torch.Tensor) -> bool:
    """Returns True if a weight has elements, of a dtype whose bits can be compared."""
    return weight.dtype in _BITS and weight.numel() > 0


_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
