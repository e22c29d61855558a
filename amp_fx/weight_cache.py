"""Shows and controls the cache of values computed from weights.

Casts, packed and folded weights, and the values of ``amp_fx.keep`` are computed once and shared by
all graphs of the process. They are recomputed before the next use after a write to one of their
weights. ``options={"verify": ...}`` determines how writes without a signal are detected::

    amp_fx.weight_cache.stats()            # entries, bytes, hits, refreshes
    amp_fx.weight_cache.invalidate(model)  # recompute its values in the next call
    amp_fx.weight_cache.clear()            # drop all values
    amp_fx.weight_cache.set_limit(2**30)   # maximum bytes of all values
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from amp_fx.reports import printed
from amp_fx.weights.store import STORE, tensors_of
from amp_fx.weights.watch import engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from amp_fx.weights.cache_entry import CacheEntry


@dataclasses.dataclass(frozen=True)
class KeptValue:
    """A cached value.

    Attributes:
        model: Class of the model (or name of the function) whose graph requested it first.
        weights: Names of its weights.
        ops: Names of the ops that compute it, in order.
        bytes: Bytes that the value takes in addition to the weights, without padding.
    """

    model: str
    weights: tuple[str, ...]
    ops: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of the cache.

    Attributes:
        entries: Number of values that take memory.
        bytes: Bytes that these values take now; evicted values take none.
        hits: Number of uses of fresh values.
        refreshes: Number of computations of values.
        by_model: Statistics for each class of model (or function) that requested values first.
        values: The values that take memory.
    """

    entries: int
    bytes: int
    hits: int
    refreshes: int
    by_model: dict[str, Stats] = dataclasses.field(default_factory=dict)
    values: tuple[KeptValue, ...] = ()

    def __str__(self) -> str:
        """Returns a table of the statistics."""
        from rich import box
        from rich.table import Column, Table

        right = [Column(name, justify="right") for name in ("kept", "bytes", "hits", "made")]
        table = Table("model", *right, box=box.SIMPLE_HEAD)
        for name, stats in {**self.by_model, "all": self}.items():
            numbers = stats.entries, stats.bytes, stats.hits, stats.refreshes
            table.add_row(name, *[f"{number:,}" for number in numbers])
        return printed(table, 100)


def stats() -> Stats:
    """Returns statistics of the cache."""
    with STORE.locked():
        entries = [entry for entry in STORE.entries.values() if entry.num_bytes]
        owners = sorted({entry.owner for entry in entries})
        by_model = {
            owner: _count([entry for entry in entries if entry.owner == owner]) for owner in owners
        }
        return dataclasses.replace(_count(entries), by_model=by_model)


def _count(entries: Sequence[CacheEntry]) -> Stats:
    distinct = {id(entry.value): entry for entry in entries}.values()  # shared values count once
    return Stats(
        entries=len(distinct),
        bytes=sum(entry.num_bytes for entry in distinct),
        hits=sum(entry.slot.hits for entry in entries),
        refreshes=sum(entry.slot.made for entry in entries),
        by_model={},
        values=tuple(
            KeptValue(entry.owner, entry.spec.names, entry.spec.ops, entry.num_bytes)
            for entry in distinct
        ),
    )


def invalidate(model_or_tensor: torch.nn.Module | torch.Tensor | None = None) -> None:
    """Makes values stale, so that they are recomputed before their next use.

    Args:
        model_or_tensor: The model or weight whose values become stale; None for all values.

    Raises:
        TypeError: The argument is neither a module, nor a tensor, nor None.
    """
    with STORE.locked():
        if model_or_tensor is None:
            entries = list(STORE.entries.values())
        else:
            tensors = tensors_of(model_or_tensor)
            entries = [entry for tensor in tensors for entry in STORE.of_weight(tensor)]
        for entry in entries:
            entry.slot.invalidate()


def clear() -> None:
    """Drops all values and stops watching their weights until graphs are called again."""
    with STORE.locked():
        for entry in list(STORE.entries.values()):
            for weight in entry.weights() or ():
                if weight.device.type != "meta":
                    engine().unwatch(weight)
            STORE.drop(entry)


def set_limit(num_bytes: int | None) -> None:
    """Limits the memory of the cache. Each call recomputes values beyond the limit.

    Args:
        num_bytes: The limit; None for no limit. Values with the fewest hits are dropped first. A
            new value replaces values without hits; if there are none, it is not cached.

    Raises:
        ValueError: The limit is negative.
    """
    if num_bytes is not None and num_bytes < 0:
        raise ValueError(f"num_bytes must be None or at least 0, got {num_bytes}")
    with STORE.locked():
        STORE.limit = num_bytes
        if num_bytes is not None:
            STORE.shrink(num_bytes)
