"""Optimizer steps that write cached values together with the weights.

A step writes casts, and values with the same bits under every compiler, such as float8 data. The
next call computes all other values.

The step writes a weight through an alias, which shares the weight's memory but has a separate
storage. The weight's own storage stays watched, so writes by other code are still detected. After
the step, ``finish_step`` in ``csrc/watch.cpp`` marks the written values as fresh.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from amp_fx.torch_private.pytree import tree_map
from amp_fx.weights.engine import engine, is_available
from amp_fx.weights.entry import computing_values
from amp_fx.weights.split import CachedValueSpec
from amp_fx.weights.spread import parts_of
from amp_fx.weights.store import STORE
from amp_fx.weights.stream_order import accelerator_devices
from amp_fx.weights.write_signals import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from amp_fx.weights.entry import CacheEntry

    Computed = tuple[torch.Tensor, Callable[..., Any], tuple[torch.Tensor, ...]]

MAX_UNUSED = 8
"""Number of consecutive steps that still write a value without hits."""


class Targets(NamedTuple):
    """Tensors that a step writes.

    Attributes:
        weights: For each weight, the tensor through which the step writes it.
        lows: For each weight, its casts; they may have any low dtype and any strides.
        computed: For each other value, the tensor of ``weights``, the function that computes the
            value from it, and the tensors that receive the value.
    """

    weights: list[torch.Tensor]
    lows: list[list[torch.Tensor]]
    computed: list[Computed]


class HitTracker:
    """Counts how often values are recomputed without a hit in between.

    Args:
        max_unused: Number of consecutive times that a value without hits is still recomputed.
    """

    def __init__(self, max_unused: int) -> None:
        self._max_unused = max_unused
        self._counts: weakref.WeakKeyDictionary[CacheEntry, tuple[int, int]]
        self._counts = weakref.WeakKeyDictionary()

    def is_used(self, entry: CacheEntry) -> bool:
        """Returns True if a value is worth recomputing. Call it once before each recomputation."""
        previous_hits, num_unused = self._counts.get(entry, (-1, 0))
        hits = entry.slot.hits
        num_unused = num_unused + 1 if hits == previous_hits else 0
        self._counts[entry] = hits, num_unused
        return num_unused <= self._max_unused


_steps: weakref.WeakSet[StepCopies] = weakref.WeakSet()


def weights_of_steps() -> set[int]:
    """Returns the identities of all weights whose cached values a compiled step writes."""
    return {id(part) for step in list(_steps) for part in parts_of(step.parameters())}


class StepCopies:
    """Cached values that the steps of one optimizer write.

    Graphs that are compiled later cache casts of the optimizer's weights, even in training on the
    CPU.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._hits = HitTracker(MAX_UNUSED)
        _steps.add(self)

    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters of the optimizer."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @contextlib.contextmanager
    def written(self, weights: Sequence[torch.Tensor]) -> Iterator[Targets]:
        """Context in which a step writes weights and their cached values.

        If the values cannot be written (``csrc/watch.cpp`` is not built, or a CUDA graph is being
        captured), the targets contain only the weights, and the next call computes the values.
        """
        devices = accelerator_devices(weights)
        pairs = [] if not is_available() or is_capturing(devices) else self._pairs(weights)
        state = _begin(pairs, devices)
        if state is None:
            yield Targets(list(weights), [[] for _ in weights], [])
            return
        begun, values = state
        is_written = False
        try:
            yield _targets(weights, pairs, values)
            is_written = True
        finally:
            if is_written:
                _end(pairs, begun, values, devices)
            else:
                engine().mark([weight for _, weight in pairs])

    def _pairs(self, weights: Sequence[torch.Tensor]) -> list[tuple[CacheEntry, torch.Tensor]]:
        """Returns the entries that a step can write, each with its weight."""
        return [
            (entry, weight)
            for weight in weights
            for entry in STORE.of_weight(weight)
            if _can_be_written(entry.spec)
            and entry.value is not None
            and not engine().is_distrusted(weight)
            and entry.slot.matches((weight,))
            and self._hits.is_used(entry)
        ]


def _can_be_written(spec: Any) -> bool:
    is_of_one = isinstance(spec, CachedValueSpec) and len(spec.positions) == 1
    return is_of_one and not spec.is_alias and (spec.is_cast or spec.is_exact)


def _targets(
    weights: Sequence[torch.Tensor],
    pairs: Sequence[tuple[CacheEntry, torch.Tensor]],
    values: Sequence[Any],
) -> Targets:
    aliases = {id(weight): engine().alias(weight) for _, weight in pairs}
    lows: dict[int, list[torch.Tensor]] = {}
    computed: list[Computed] = []
    for (entry, weight), value in zip(pairs, values, strict=True):
        spec: Any = entry.spec
        if spec.is_cast:
            lows.setdefault(id(weight), []).append(value)
        else:
            outputs = value if isinstance(value, tuple) else (value,)
            computed.append((aliases[id(weight)], spec.function, outputs))
    written = [aliases.get(id(weight), weight) for weight in weights]
    return Targets(written, [lows.get(id(weight), []) for weight in weights], computed)


def _begin(
    pairs: Sequence[tuple[CacheEntry, torch.Tensor]], devices: tuple[torch.device, ...]
) -> tuple[Any, list[Any]] | None:
    """Records the state of the weights before a step.

    A value that a call or a backward may still read is not overwritten; the step writes a new
    tensor instead. References to the returned tensors prevent other threads from reusing their
    memory.

    Returns:
        The state for ``_end`` and the tensors to write; None if the step cannot write values.
    """
    if not pairs:
        return None
    with STORE.locked() as is_outermost, computing_values():
        if not is_outermost:
            return None
        if any(entry.value is None for entry, _ in pairs):  # another thread dropped a value
            return None
        STORE.streams.wait(devices)
        engine().mark([weight for _, weight in pairs])
        sources = tuple(weight for _, weight in pairs)
        # A separate slot, because other threads may start the slots of the entries.
        started = engine().CacheSlot(sources, False)
        engine().start((started,), (sources,))
        reusable = engine().reusable(tuple(entry.slot for entry, _ in pairs))
        is_free = STORE.memory_check()
        values, allocated = [], []
        for (entry, weight), old in zip(pairs, reusable, strict=True):
            is_reused = old is not None and is_free(entry, (weight,))
            values.append(old if is_reused else tree_map(torch.empty_like, entry.value))
            allocated.append(entry.allocated if is_reused else None)
        return (started, allocated), values


def _end(
    pairs: Sequence[tuple[CacheEntry, torch.Tensor]],
    begun: tuple[Any, list[int | None]],
    values: Sequence[Any],
    devices: tuple[torch.device, ...],
) -> None:
    with STORE.locked():
        slots = tuple(entry.slot for entry, _ in pairs)
        sources = tuple((weight,) for _, weight in pairs)
        started, allocated = begun
        now = STORE.streams.allocated()
        engine().finish_step(started, slots, tuple(values), sources)
        for (entry, _), value, at in zip(pairs, values, allocated, strict=True):
            if entry.value is value:
                entry.allocated = now if at is None else at
        STORE.streams.record(devices)
