"""Optimizer steps that write cached values together with the weights.

A step writes casts, and values with the same bits under every compiler, such as float8 data. The
next call computes the others.

The step writes a weight through an alias, which shares its memory and has another storage. So the
weight stays watched, and writes by other code are detected as always. The step records its own
write, and its values are fresh afterwards (``finish_step`` in ``csrc/watch.cpp``).

A value that a call or a backward may still read is not overwritten: a new one replaces it. If
weights cannot be written this way (``csrc/watch.cpp`` cannot be built, or a CUDA graph is being
captured), the step writes them as any other code does, and the next call computes the values.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from amp_fx.torch_private.pytree import tree_map
from amp_fx.weights.engine import engine, is_available
from amp_fx.weights.entry import computing_values
from amp_fx.weights.sample import remember_again
from amp_fx.weights.split import CachedValueSpec
from amp_fx.weights.spread import parts_of
from amp_fx.weights.store import STORE
from amp_fx.weights.stream_order import accelerator_devices
from amp_fx.weights.write_signals import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from amp_fx.weights.entry import Entry

    Computed = tuple[torch.Tensor, Callable[..., Any], tuple[torch.Tensor, ...]]

MAX_UNUSED = 8
"""Number of steps in a row that write a value which no call uses."""


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
        now = entry.slot.hits
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
        self._hits = HitTracker(MAX_UNUSED)
        _steps.add(self)

    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters of the optimizer."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @contextlib.contextmanager
    def written(self, weights: Sequence[torch.Tensor]) -> Iterator[Targets]:
        """Context in which a step writes weights and their cached values."""
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
        """Returns the cached values of the weights, each with its weight."""
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
        spec: Any = entry.spec
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
    """Records the state of the weights before a step.

    References to the returned tensors prevent other threads from refreshing values in their
    memory.

    Returns:
        The state for ``_end`` and the tensors to write; None if the step cannot write values.
    """
    if not pairs:
        return None
    with STORE.locked() as is_outermost, computing_values():
        if not is_outermost or any(entry.value is None for entry, _ in pairs):  # dropped in between
            return None
        STORE.streams.wait(devices)
        makes_new = STORE.streams.are_several(devices)
        engine().mark([weight for _, weight in pairs])
        sources = tuple(weight for _, weight in pairs)
        # Other threads may start the slots of the entries.
        started = engine().CacheSlot(sources, False)
        engine().start((started,), (sources,))
        olds = engine().reusable(tuple(entry.slot for entry, _ in pairs))
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
    with STORE.locked():
        slots = tuple(entry.slot for entry, _ in pairs)
        own_weights = tuple((weight,) for _, weight in pairs)
        engine().finish_step(started, slots, tuple(values), own_weights)
        if devices:
            remember_again(entry for entry, _ in pairs)
        STORE.streams.record(devices)
