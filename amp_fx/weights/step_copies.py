"""Optimizer steps that write the kept copies of their weights along with the weights.

Such a step writes a weight through an alias: the same bytes in a storage of its own. So the
weight stays watched throughout, and a write by anybody else, before, meanwhile or afterwards,
is seen as ever. The step says itself that it writes (``begin_step`` in ``native/watch.cpp``),
and once it has, its copies are those of the weights as they then are.

A copy that a call or a backward may still read is not written: a new one takes its place.
Where weights cannot be written so (``native/watch.cpp`` is not there, torch has no hook on
storages, a CUDA graph is recorded), the step writes them as any other code does, and their
copies are made again by the next call.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from amp_fx.weights.engine import engine
from amp_fx.weights.kept_copies import CACHE, Uses, making_copies
from amp_fx.weights.stream_order import accelerator_devices
from amp_fx.weights.write_signals import is_capturing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from amp_fx.weights.kept_copies import KeptCopy

MOST_UNUSED = 8
"""Steps in a row after which a copy that no call took is written no more."""


class Targets(NamedTuple):
    """What a step writes.

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
        """Where a step writes some weights and their copies; it has when this is left.

        Args:
            weights: plain tensors, each once. Their copies are those that calls take, and each
                has to be given the weight's new value, rounded.
        """
        devices = accelerator_devices(weights)
        pairs = [] if is_capturing(devices) else self._pairs(weights)
        sources = tuple(weight for _, weight in pairs)
        tickets = _begin([kept for kept, _ in pairs], devices)
        if tickets is None:
            yield Targets(list(weights), [[] for _ in weights])
            return
        is_written = False
        try:
            yield _targets(weights, sources, tickets)
            is_written = True
        finally:
            if is_written:
                _end(tickets, sources, devices)
            else:
                engine().mark(list(sources))

    def _pairs(self, weights: Sequence[torch.Tensor]) -> list[tuple[KeptCopy, torch.Tensor]]:
        """The copies of the weights that calls find where they lie now."""
        by_id = {id(weight): weight for weight in weights}
        known = [(kept, by_id.get(key[0])) for key, kept in list(CACHE.copies.items())]
        return [
            (kept, weight)
            for kept, weight in known
            if weight is not None
            and kept.source() is weight
            and not kept.copy.is_distrusted
            and kept.copy.lies_where(weight)
            and self._uses.is_used(kept)
        ]


def _targets(
    weights: Sequence[torch.Tensor],
    sources: Iterable[torch.Tensor],
    tickets: tuple[tuple[Any, Any, int], ...],
) -> Targets:
    lows: dict[int, list[torch.Tensor]] = {}
    for source, (_, low, _) in zip(sources, tickets, strict=True):
        lows.setdefault(id(source), []).extend([] if low is None else [low])
    through = [engine().alias(w) if id(w) in lows else w for w in weights]
    return Targets(through, [lows.get(id(weight), []) for weight in weights])


def _begin(kept: Sequence[KeptCopy], devices: tuple[torch.device, ...]) -> Any:
    """A ticket for each copy; None where none is written."""
    if not kept or not engine().has_hook:
        return None
    with CACHE.exclusive() as is_first, making_copies():
        if not is_first or any(each.copy.low is None for each in kept):  # dropped meanwhile
            return None
        CACHE.streams.wait(devices)
        makes_new = CACHE.streams.are_several(devices)
        return engine().begin_step(tuple(each.copy for each in kept), makes_new)


def _end(
    tickets: tuple[Any, ...],
    sources: tuple[torch.Tensor, ...],
    devices: tuple[torch.device, ...],
) -> None:
    with CACHE.exclusive(), CACHE.moving():
        engine().end_step(tickets, sources)
        CACHE.streams.record(devices)
