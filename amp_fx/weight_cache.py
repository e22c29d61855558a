"""Shows and controls what is kept of weights, and made again when a weight was written.

Every value that is computed from weights alone, a cast, a packed or folded weight or what
``amp_fx.keep`` was asked for, is made once and shared by all graphs of the process. It is made
again before the first use after a write to one of its weights. No signal tells of a write through
a pointer, a NumPy array or a DLPack alias that was taken before the latest call. So each call on
the CPU compares one element of every weight with what it was: a write of a whole weight is
noticed at the next call, one of a part within 64 calls if the part is at least a 32nd of the
weight, a smaller part perhaps never. Then the weight is named in a warning, and what is made of
it is made again on every call. ``options={"verify": "full"}`` compares all, and raises; ``"off"``
compares none.

Use::

    amp_fx.weight_cache.stats()            # entries, bytes, hits, refreshes
    amp_fx.weight_cache.invalidate(model)  # make its values again at the next call
    amp_fx.weight_cache.clear()            # drop all values
    amp_fx.weight_cache.set_limit(2**30)   # bytes that values may take together
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich import box
from rich.table import Column, Table

from amp_fx.reports import printed
from amp_fx.weights.engine import engine
from amp_fx.weights.store import STORE, tensors_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from amp_fx.weights.store import Entry


@dataclasses.dataclass(frozen=True)
class KeptValue:
    """A value that is kept, and made again when a weight that it is made of was written.

    Attributes:
        model: The class of the model (or the function) whose graph keeps it.
        weights: Names of the weights that it is made of.
        ops: Names of the ops that make it, in order.
        bytes: Bytes that it takes besides the weights; those of padding are not counted.
    """

    model: str
    weights: tuple[str, ...]
    ops: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts what the cache holds and did.

    Attributes:
        entries: Number of values that take bytes.
        bytes: Bytes that they take now: one that is about to be replaced takes none.
        hits: Times that a call found one fresh.
        refreshes: Times that one was made or made again.
        by_model: The same, by the class of the model (or the function) whose graph asked first.
        values: Each value that takes bytes.
    """

    entries: int
    bytes: int
    hits: int
    refreshes: int
    by_model: dict[str, Stats] = dataclasses.field(default_factory=dict)
    values: tuple[KeptValue, ...] = ()

    def __str__(self) -> str:
        """A small table."""
        right = [Column(name, justify="right") for name in ("kept", "bytes", "hits", "made")]
        table = Table("model", *right, box=box.SIMPLE_HEAD)
        for name, stats in {**self.by_model, "all": self}.items():
            numbers = stats.entries, stats.bytes, stats.hits, stats.refreshes
            table.add_row(name, *[f"{number:,}" for number in numbers])
        return printed(table, 100)


def stats() -> Stats:
    """Counts of what is kept."""
    with STORE.exclusive():
        entries = [entry for entry in STORE.entries.values() if entry.num_bytes]
        owners = sorted({entry.owner for entry in entries})
        by_model = {
            owner: _count([entry for entry in entries if entry.owner == owner]) for owner in owners
        }
        return dataclasses.replace(_count(entries), by_model=by_model)


def _count(entries: Sequence[Entry]) -> Stats:
    distinct = {id(entry.value): entry for entry in entries}.values()  # what is shared, once
    return Stats(
        entries=len(distinct),
        bytes=sum(entry.num_bytes for entry in distinct),
        hits=sum(entry.kept.hits for entry in entries),
        refreshes=sum(entry.kept.made for entry in entries),
        by_model={},
        values=tuple(
            KeptValue(entry.owner, entry.wanted.names, entry.wanted.ops, entry.num_bytes)
            for entry in distinct
        ),
    )


def invalidate(model_or_tensor: torch.nn.Module | torch.Tensor | None = None) -> None:
    """Makes values again before their next use.

    Args:
        model_or_tensor: Whose values; None for all.

    Raises:
        TypeError: It is something else.
    """
    with STORE.exclusive():
        if model_or_tensor is None:
            found = list(STORE.entries.values())
        else:
            tensors = tensors_of(model_or_tensor)
            found = [entry for tensor in tensors for entry in STORE.of_weight(tensor)]
        for entry in found:
            entry.kept.invalidate()


def clear() -> None:
    """Drops all values and stops watching their weights, until graphs are called again."""
    with STORE.exclusive():
        for entry in list(STORE.entries.values()):
            for weight in entry.weights() or ():
                if weight.device.type != "meta":
                    engine().unwatch(weight)
            STORE.drop(entry)


def set_limit(num_bytes: int | None) -> None:
    """Bounds the bytes that values take together; past it, weights are cast per call.

    Args:
        num_bytes: The bound; None for none. Values with the fewest hits go first; a newcomer
            takes the place of values that were never hit, or is not kept.

    Raises:
        ValueError: The bound is negative.
    """
    if num_bytes is not None and num_bytes < 0:
        raise ValueError(f"the limit is a number of bytes or None, not {num_bytes}")
    with STORE.exclusive():
        STORE.limit = num_bytes
        if num_bytes is not None:
            STORE.shrink(num_bytes)
