"""Optimizer steps that write the kept copies of their weights along with the weights.

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

from amp_fx.weights.engine import engine, has_hook
from amp_fx.weights.kept_call import Uses
from amp_fx.weights.kept_cast import Slot
from amp_fx.weights.sample import remember_again
from amp_fx.weights.store import STORE, making_values
from amp_fx.weights.stream_order import accelerator_devices
from amp_fx.weights.write_signals import is_capturing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from amp_fx.weights.store import Entry

MOST_UNUSED = 8
"""Steps in a row after which a copy that no call took is written no more."""


class Targets(NamedTuple):
    """Holds what a step writes.

    Attributes:
        weights: in the place of each weight the tensor to write it through.
        lows: for each weight its copies, of any low dtype, and laid out as they may be.
    """

    weights: list[torch.Tensor]
    lows: list[list[torch.Tensor]]


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
            yield Targets(list(weights), [[] for _ in weights])
            return
        started, lows = begun
        is_written = False
        try:
            yield _targets(weights, pairs, lows)
            is_written = True
        finally:
            if is_written:
                _end(pairs, started, lows, devices)
            else:
                engine().mark([weight for _, weight in pairs])

    def _pairs(self, weights: Sequence[torch.Tensor]) -> list[tuple[Entry, torch.Tensor]]:
        """The copies of the weights that calls find where they lie now."""
        return [
            (entry, weight)
            for weight in weights
            for entry in STORE.of_weight(weight)
            if isinstance(entry.wanted, Slot)
            and not entry.wanted.is_alias
            and entry.value is not None
            and not engine().is_distrusted(weight)
            and entry.kept.lies_where((weight,))
            and self._uses.is_used(entry)
        ]


def _targets(
    weights: Sequence[torch.Tensor],
    pairs: Sequence[tuple[Entry, torch.Tensor]],
    lows: Sequence[torch.Tensor],
) -> Targets:
    by_weight: dict[int, list[torch.Tensor]] = {}
    for (_, weight), low in zip(pairs, lows, strict=True):
        by_weight.setdefault(id(weight), []).append(low)
    through = [engine().alias(w) if id(w) in by_weight else w for w in weights]
    return Targets(through, [by_weight.get(id(weight), []) for weight in weights])


def _begin(
    pairs: Sequence[tuple[Entry, torch.Tensor]], devices: tuple[torch.device, ...]
) -> tuple[Any, list[torch.Tensor]] | None:
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
            torch.empty_like(entry.value) if old is None or makes_new else old
            for (entry, _), old in zip(pairs, olds, strict=True)
        ]


def _end(
    pairs: Sequence[tuple[Entry, torch.Tensor]],
    started: Any,
    lows: Sequence[torch.Tensor],
    devices: tuple[torch.device, ...],
) -> None:
    with STORE.exclusive():
        kepts = tuple(entry.kept for entry, _ in pairs)
        for i, kept in enumerate(kepts):
            kept.adopt(started, (i,))
        engine().finish_step(kepts, tuple(lows), tuple((weight,) for _, weight in pairs))
        if devices:
            remember_again(entry for entry, _ in pairs)
        STORE.streams.record(devices)
