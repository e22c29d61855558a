"""Detects writes without a signal on accelerators by sampling weights asynchronously.

When a value is computed, ``remember`` copies some elements of each of its weights on the device.
Some later calls of a graph start a comparison with the current elements on their stream. The first
call after the comparison has finished reads its result on the host. On the CPU, ``csrc/watch.cpp``
compares one element per call instead.

``STORE.locked`` protects the state of this module, except in ``DeviceSample.read``.
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

    from amp_fx.weights.entry import CacheEntry, Weights

MIN_SAMPLED = 64
"""Minimum number of sampled elements per weight. Every element of a dense weight with fewer than
128 elements is sampled."""

MAX_SAMPLED = 4 * MIN_SAMPLED
"""Maximum number of sampled elements per weight; it exceeds the minimum because steps are whole
numbers."""

CALLS_BETWEEN = 16
"""Number of calls from one comparison to the next after the first calls."""

FIRST_CALLS = 4
"""Number of first calls that each start a comparison."""


class SampledEntries(tuple["CacheEntry", ...]):
    """Entries of one set of weights of a graph, with the state of their comparisons."""

    num_calls = 0
    due = 1

    def __init__(self, _: Iterable[CacheEntry]) -> None:
        self.answers: defaultdict[Any, HostCopy] = defaultdict(HostCopy)

    def room(self, device: torch.device, dtype: torch.dtype) -> int:
        """Returns the maximum number of elements in a comparison on a device, of one dtype.

        The first comparison pins host memory of this size, so that later ones need not pin more.
        """
        weights = [weight for entry in self for weight in entry.weights() or ()]
        compared = [w for w in weights if (w.device, w.dtype) == (device, dtype)]
        return sum(min(weight.numel(), MAX_SAMPLED) for weight in compared)

    def is_due(self) -> bool:
        """Counts a call; returns True if the call must start a comparison.

        Each of the first calls does, then every 16th call. A call does not if a comparison is
        still running.
        """
        self.num_calls += 1
        is_running = any(answer.is_under_way for answer in self.answers.values())
        if is_running or self.num_calls < self.due:
            return False
        self.due = self.num_calls + (1 if self.num_calls < FIRST_CALLS else CALLS_BETWEEN)
        return True


class _Grid(NamedTuple):
    """Elements of a strided tensor, equally spaced in each dimension.

    Attributes:
        sizes: Numbers of elements in each dimension.
        strides: Their distances in each dimension.
        start: Position of the first element behind the first element of the tensor.
        layout: Size and stride of the tensor.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    layout: tuple[torch.Size, tuple[int, ...]]

    @classmethod
    def over(cls, tensor: torch.Tensor) -> _Grid:
        """Chooses ``MIN_SAMPLED`` to ``MAX_SAMPLED`` distinct elements of a tensor.

        Outer dimensions are sampled first. Every contiguous 64th of the elements contains a sample,
        so a comparison detects every write that covers at least that much of a weight. It detects
        a smaller write only if the write changes a sampled element.
        """
        sizes: list[int] = []
        strides: list[int] = []
        start, minimum = 0, MIN_SAMPLED
        for stride, size in _distinct_elements(tensor):
            density = 1 + _random.random() if not sizes else 1
            step = max(1, int(size / minimum / density))
            first = _random.randrange(step)
            sizes.append(len(range(first, size, step)))
            strides.append(stride * step)
            start += stride * first
            minimum = -(-minimum // sizes[-1])
        return cls(tuple(sizes), tuple(strides), start, (tensor.size(), tensor.stride()))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the elements as a one-dimensional tensor."""
        start = tensor.storage_offset() + self.start
        elements = tensor.as_strided(self.sizes, self.strides, start)
        return elements if len(self.sizes) == 1 else elements.reshape(-1)


def _distinct_elements(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Returns the stride and size of each dimension, in descending order of strides.

    Expanded dimensions are omitted. Dimensions that are adjacent in memory are merged, so a dense
    tensor of any layout has one dimension.
    """
    pairs = zip(tensor.stride(), tensor.size(), strict=True)
    merged: list[tuple[int, int]] = []
    for stride, size in sorted((p for p in pairs if p[0] and p[1] > 1), reverse=True):
        if merged and merged[-1][0] == stride * size:
            merged[-1] = stride, merged[-1][1] * size
        else:
            merged.append((stride, size))
    return merged


class WeightSample(NamedTuple):
    """Elements of one weight of an entry, recorded when the entry's value was computed."""

    position: int
    grid: _Grid
    recorded: torch.Tensor


_random = random.Random()  # does not advance the user's generator


def remember(entries: Iterable[CacheEntry]) -> None:
    """Samples the weights of fresh values that have no samples yet.

    The current streams read the weights after they have computed the values. The choice of elements
    is kept, because training samples all weights after each update.
    """
    with computing_values():
        groups: defaultdict[Any, list[tuple[CacheEntry, int, _Grid, torch.Tensor]]]
        groups = defaultdict(list)
        sampled: dict[CacheEntry, list[WeightSample]] = {}
        for entry in entries:
            weights = None if entry.has_samples() else _fresh_weights(entry)
            if weights is None:
                continue
            sampled[entry] = []
            grids = {sample.position: sample.grid for sample in entry.samples}
            for i, weight in enumerate(weights):
                if _is_comparable(weight):
                    grid = grids.get(i)
                    if grid is None or grid.layout != (weight.size(), weight.stride()):
                        grid = _Grid.over(weight)
                    groups[weight.device, weight.dtype].append((entry, i, grid, grid.of(weight)))
        for group in groups.values():
            read = [elements for *_, elements in group]
            copies = torch.cat(read).split_with_sizes([elements.numel() for elements in read])
            for (entry, i, grid, _), elements in zip(group, copies, strict=True):
                sampled[entry].append(WeightSample(i, grid, elements))
        for entry, samples in sampled.items():
            entry.samples, entry.num_sampled = samples, entry.slot.made


def remember_again(entries: Iterable[CacheEntry]) -> None:
    """Samples weights again whose values were recomputed since their samples."""
    remember([entry for entry in entries if entry.num_sampled is not None])


class DeviceSample:
    """Comparisons of one graph, for all of its sets of weights."""

    def __init__(self) -> None:
        self._running: deque[_SampleComparison] = deque()
        self._reading = threading.Lock()

    def start(self, entries: SampledEntries) -> None:
        """Starts a comparison of the weights of all fresh values."""
        with torch.profiler.record_function("amp_fx::sample"), computing_values():
            groups: defaultdict[Any, list[tuple[CacheEntry, WeightSample, torch.Tensor]]]
            groups = defaultdict(list)
            for entry in entries:
                weights = _fresh_weights(entry) if entry.has_samples() else None
                if weights is not None:
                    for sample in entry.samples:
                        weight = weights[sample.position]
                        groups[weight.device, weight.dtype].append((entry, sample, weight))
            for key, sampled in groups.items():
                comparison = _SampleComparison(entries.answers[key], sampled, entries.room(*key))
                self._running.append(comparison)

    def read(self) -> list[tuple[str, torch.Tensor]]:
        """Returns names and tensors of changed weights, from comparisons that have finished."""
        if not self._running or not self._reading.acquire(blocking=False):
            return []
        try:
            changed = []
            while self._running and (answer := self._running[0].answer.take()) is not None:
                changed += self._running.popleft().changed(answer)
            return changed
        finally:
            self._reading.release()


class _SampleComparison:
    """Comparison of samples on one device, of one dtype.

    It holds no references to weights because ``torch.utils.swap_tensors`` would reject them.

    Args:
        answer: Copies the result to the host.
        sampled: The samples, each with its entry and weight.
        room: The maximum number of elements in a later comparison.
    """

    def __init__(
        self,
        answer: HostCopy,
        sampled: Sequence[tuple[CacheEntry, WeightSample, torch.Tensor]],
        room: int,
    ) -> None:
        self.answer = answer
        self._sampled = [(weakref.ref(e), e.slot.made, s.position) for e, s, _ in sampled]
        recorded = [sample.recorded for _, sample, _ in sampled]
        self._lengths = [elements.numel() for elements in recorded]
        STORE.streams.hold([*[weight for *_, weight in sampled], *recorded])
        current = torch.cat([sample.grid.of(weight) for _, sample, weight in sampled])
        bits = _BITS[current.dtype]
        self.answer.start(current.view(bits) != torch.cat(recorded).view(bits), room=room)

    def changed(self, answer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Returns names and tensors of weights with a difference that no signal explains.

        Values that are stale now, or were refreshed since the comparison, are ignored: a signal
        has indicated the write.
        """
        changed: list[tuple[str, torch.Tensor]] = []
        if not answer.any():
            return changed
        answers = answer.split_with_sizes(self._lengths)
        for (ref, num_computed, position), differs in zip(self._sampled, answers, strict=True):
            entry = ref()
            if entry is not None and differs.any() and entry.slot.made == num_computed:
                weights = _fresh_weights(entry)
                if weights is not None:
                    changed.append((entry.spec.names[position], weights[position]))
        return changed


def _fresh_weights(entry: CacheEntry) -> Weights | None:
    """Returns the weights of a fresh value; None if the value is stale or an alias."""
    weights = None if entry.spec.is_alias else entry.weights()
    # Another thread may assign new data to a weight, so each weight's memory is looked up once.
    current = None if weights is None else tuple([weight.detach() for weight in weights])
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
