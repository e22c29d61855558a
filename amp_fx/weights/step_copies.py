"""Optimizer steps that write the kept copies of their weights along with the weights.

Copies are casts, and weights quantized to float8 with a scale per row. One scale for a whole weight
is known only once the weight is written: the next call quantizes such weights.

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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from amp_fx.weights.engine import engine, has_hook
from amp_fx.weights.kept_call import Uses
from amp_fx.weights.kept_cast import Slot
from amp_fx.weights.kept_float8 import Float8Slot
from amp_fx.weights.sample import remember_again
from amp_fx.weights.store import STORE, making_values
from amp_fx.weights.stream_order import accelerator_devices
from amp_fx.weights.write_signals import is_capturing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from amp_fx.weights.kept_float8 import Quantized
    from amp_fx.weights.store import Entry

MOST_UNUSED = 8
"""Steps in a row after which a copy that no call took is written no more."""


class Targets(NamedTuple):
    """Holds what a step writes.

    Attributes:
        weights: in the place of each weight the tensor to write it through.
        lows: for each weight its casts, of any low dtype, and laid out as they may be.
        quantized: what is quantized of weights: the tensor of ``weights``, what ``float8_weight``
            takes besides it, and the data and factors to write.
    """

    weights: list[torch.Tensor]
    lows: list[list[torch.Tensor]]
    quantized: list[Quantized]


class StepCopies:
    """The copies that one optimizer's steps write."""

    def __init__(self) -> None:
        self._uses = Uses(MOST_UNUSED)

    @contextlib.contextmanager
    def written(self, weights: Sequence[torch.Tensor]) -> Iterator[Targets]:
        """Lets a step write weights and their copies; the step must end before the context does."""
        devices = accelerator_devices(weights)
        pairs = [] if not has_hook() or is_capturing(devices) else self._pairs(weights)
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
            and self._uses.is_used(entry)
        ]


def _can_be_written(wanted: Any) -> bool:
    if isinstance(wanted, Float8Slot):
        return wanted.is_by_row
    return isinstance(wanted, Slot) and not wanted.is_alias


def _targets(
    weights: Sequence[torch.Tensor],
    pairs: Sequence[tuple[Entry, torch.Tensor]],
    values: Sequence[Any],
) -> Targets:
    through = {id(weight): engine().alias(weight) for _, weight in pairs}
    lows: dict[int, list[torch.Tensor]] = {}
    quantized: list[Quantized] = []
    for (entry, weight), value in zip(pairs, values, strict=True):
        if isinstance(entry.wanted, Float8Slot):
            quantized.append((through[id(weight)], entry.wanted.how, value))
        else:
            lows.setdefault(id(weight), []).append(value)
    written = [through.get(id(weight), weight) for weight in weights]
    return Targets(written, [lows.get(id(weight), []) for weight in weights], quantized)


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
