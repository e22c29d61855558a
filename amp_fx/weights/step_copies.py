"""Optimizer steps that write the kept copies of their weights along with the weights.

Written are casts, and values whose bits no compiler changes, such as float8 data. The next call
computes all others.

Such a step writes a weight through an alias: the same bytes in a storage of its own. So the
weight stays watched throughout, and a write by anybody else, before, meanwhile or afterwards,
is seen as ever. The step says itself that it writes, and once it has, its copies are those of
the weights as they then are (``finish_step`` in ``csrc/watch.cpp``).

A copy that a call or a backward may still read is not written: a new one takes its place.
Where weights cannot be written so (``csrc/watch.cpp`` is not there, torch has no hook on
storages, a CUDA graph is recorded), the step writes them as any other code does, and their
copies are made again by the next call.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from amp_fx.weights.engine import engine, is_available
from amp_fx.weights.sample import remember_again
from amp_fx.weights.split import CachedValueSpec
from amp_fx.weights.spread import parts_of
from amp_fx.weights.store import STORE, making_values
from amp_fx.weights.stream_order import accelerator_devices
from amp_fx.weights.write_signals import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from amp_fx.weights.store import Entry

    Computed = tuple[torch.Tensor, Callable[..., Any], tuple[torch.Tensor, ...]]

MOST_UNUSED = 8
"""Steps in a row after which a copy that no call took is written no more."""


class Targets(NamedTuple):
    """Holds what a step writes.

    Attributes:
        weights: For each weight the tensor to write it through.
        lows: For each weight its casts, of any low dtype, with any strides.
        computed: Other values of one weight: the tensor of ``weights``, the function that computes
            the value from it, and the tensors to write.
    """

    weights: list[torch.Tensor]
    lows: list[list[torch.Tensor]]
    computed: list[Computed]


class HitTracker:
    """Counts how often values are recomputed without a hit in between.

    Args:
        max_unused: How often in a row a value without hits is still recomputed.
    """

    def __init__(self, max_unused: int) -> None:
        self._max_unused = max_unused
        self._seen: weakref.WeakKeyDictionary[Entry, tuple[int, int]] = weakref.WeakKeyDictionary()

    def is_used(self, entry: Entry) -> bool:
        """Returns True if a value is worth recomputing; call it each time before that is done."""
        hits, num_unused = self._seen.get(entry, (-1, 0))
        now = entry.kept.hits
        num_unused = num_unused + 1 if hits == now else 0
        self._seen[entry] = now, num_unused
        return num_unused <= self._max_unused


_steps: weakref.WeakSet[StepCopies] = weakref.WeakSet()


def weights_of_steps() -> set[int]:
    """Returns the identities of all weights whose copies a compiled step writes."""
    return {id(part) for step in list(_steps) for part in parts_of(step.parameters())}


class StepCopies:
    """The cached values that the steps of one optimizer write.

    Graphs that are compiled from now on cache casts of its weights, also in training on the CPU.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._hits = HitTracker(MOST_UNUSED)
        _steps.add(self)

    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters of the optimizer."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @contextlib.contextmanager
    def written(self, weights: Sequence[torch.Tensor]) -> Iterator[Targets]:
        """Lets a step write weights and their copies; the step must end before the context does."""
        devices = accelerator_devices(weights)
        pairs = [] if not is_available() or is_capturing(devices) else self._pairs(weights)
        begun = _begin(pairs, devices)
        if begun is None:
            yield Targets(list(weights), [[] for _ in weights], [])
            return
        started, values = begun
        is_written = False
        try:
            yield _targets(weights, pairs, values)
            is_written = True
        finally:
            if is_written:
                _end(pairs, started, values, devices)
            else:
                engine().mark([weight for _, weight in pairs])

    def _pairs(self, weights: Sequence[torch.Tensor]) -> list[tuple[Entry, torch.Tensor]]:
        """The copies of the weights that calls find where they lie now."""
        return [
            (entry, weight)
            for weight in weights
            for entry in STORE.of_weight(weight)
            if _can_be_written(entry.wanted)
            and entry.value is not None
            and not engine().is_distrusted(weight)
            and entry.kept.lies_where((weight,))
            and self._hits.is_used(entry)
        ]


def _can_be_written(spec: Any) -> bool:
    is_own = isinstance(spec, CachedValueSpec) and not spec.is_alias and len(spec.positions) == 1
    return is_own and (spec.is_cast or spec.is_exact)


def _targets(
    weights: Sequence[torch.Tensor],
    pairs: Sequence[tuple[Entry, torch.Tensor]],
    values: Sequence[Any],
) -> Targets:
    through = {id(weight): engine().alias(weight) for _, weight in pairs}
    lows: dict[int, list[torch.Tensor]] = {}
    computed: list[Computed] = []
    for (entry, weight), value in zip(pairs, values, strict=True):
        spec: Any = entry.wanted
        if spec.is_cast:
            lows.setdefault(id(weight), []).append(value)
        else:
            own = value if isinstance(value, tuple) else (value,)
            computed.append((through[id(weight)], spec.function, own))
    written = [through.get(id(weight), weight) for weight in weights]
    return Targets(written, [lows.get(id(weight), []) for weight in weights], computed)


def _begin(
    pairs: Sequence[tuple[Entry, torch.Tensor]], devices: tuple[torch.device, ...]
) -> tuple[Any, list[Any]] | None:
    """Notes what the weights are now; returns that and the tensors for copies, or None.

    The weights are written from here on, and whoever holds such a tensor keeps other threads
    from making the copy again in it.
    """
    if not pairs:
        return None
    with STORE.exclusive() as is_first, making_values():
        if not is_first or any(entry.value is None for entry, _ in pairs):  # dropped meanwhile
            return None
        STORE.streams.wait(devices)
        makes_new = STORE.streams.are_several(devices)
        engine().mark([weight for _, weight in pairs])
        sources = tuple(weight for _, weight in pairs)
        started = engine().Kept(sources, False)  # of this step: others may start what it writes
        engine().start((started,), (sources,))
        olds = engine().reusable(tuple(entry.kept for entry, _ in pairs))
        return started, [
            _empty_like(entry.value) if old is None or makes_new else old
            for (entry, _), old in zip(pairs, olds, strict=True)
        ]


def _empty_like(value: Any) -> Any:
    return tree_map(torch.empty_like, value)


def _end(
    pairs: Sequence[tuple[Entry, torch.Tensor]],
    started: Any,
    values: Sequence[Any],
    devices: tuple[torch.device, ...],
) -> None:
    with STORE.exclusive():
        kepts = tuple(entry.kept for entry, _ in pairs)
        for i, kept in enumerate(kepts):
            kept.adopt(started, (i,))
        engine().finish_step(kepts, tuple(values), tuple((weight,) for _, weight in pairs))
        if devices:
            remember_again(entry for entry, _ in pairs)
        STORE.streams.record(devices)
