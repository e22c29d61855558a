"""Keeps one low-precision copy per (weight, dtype) and makes it again when it goes stale.

Graphs whose weight casts were taken out (``keep_weight_casts``) get the copies as inputs.
All graphs of a process share them. A copy is made again, together with all other stale ones
of the call, before the first call after a write to its weight; which signal tells of which
write is said in ``amp_fx.weights.write_signals``. What no signal tells of is a write through a
pointer, a NumPy array or a DLPack alias that was taken before the latest call. Every call
compares an element or two of each copy with its weight, so that a write of a whole weight is
noticed all the same at the next call on the CPU; then the weight is named in a warning, and cast
on every call. ``options={"verify": "full"}`` compares all, and raises; ``"off"`` compares none.

Frozen graphs (``amp_fx.freezing``) keep more: all that is computed from weights alone, packed
weights above all. They are watched in the same way.

Use::

    amp_fx.weight_cache.stats()            # entries, bytes, hits, refreshes
    amp_fx.weight_cache.invalidate(model)  # make its copies again at the next call
    amp_fx.weight_cache.clear()            # drop all copies
    amp_fx.weight_cache.set_limit(2**30)   # bytes that copies may take together
"""

from __future__ import annotations

import dataclasses
import io
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table

from amp_fx.weights.engine import engine
from amp_fx.weights.kept_copies import CACHE
from amp_fx.weights.spread import part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amp_fx.weights.kept_copies import KeptCopy
    from amp_fx.weights.kept_values import KeptValue, Values


@dataclasses.dataclass(frozen=True)
class Stats:
    """What the cache holds and did.

    Attributes:
        entries: Number of copies, and of other values that take bytes.
        bytes: Bytes that they take now: one that is about to be replaced takes none.
        hits: Times that a call found one fresh.
        refreshes: Times that one was made or made again.
        by_model: The same, by the class of the model (or the function) whose graph asked first.
        values: What frozen graphs keep besides copies.
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
        text = io.StringIO()
        # In a notebook rich would show it at once.
        Console(file=text, width=100, force_terminal=False, force_jupyter=False).print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def stats() -> Stats:
    """Counts of what is kept."""
    with CACHE.exclusive():
        copies = [kept for kept in list(CACHE.copies.values()) if kept.num_bytes]
        frozen = [values for values in list(CACHE.values) if not values.is_dropped]
        owners = sorted({kept.owner for kept in copies} | {values.owner for values in frozen})
        by_model = {
            owner: _count(
                [kept for kept in copies if kept.owner == owner],
                [values for values in frozen if values.owner == owner],
            )
            for owner in owners
        }
        return dataclasses.replace(_count(copies, frozen), by_model=by_model)


def _count(copies: Sequence[KeptCopy], frozen: Sequence[Values]) -> Stats:
    values = [{i: v for i, v in each.by_identity().items() if v.bytes} for each in frozen]
    listed = {i: value for each in values for i, value in each.items()}  # what is shared, once
    return Stats(
        entries=len(copies) + len(listed),
        bytes=sum(kept.low.untyped_storage().nbytes() for kept in copies)
        + sum(value.bytes for value in listed.values()),
        hits=sum(kept.copy.hits for kept in copies)
        + sum(each.hits * len(own) for each, own in zip(frozen, values, strict=True)),
        refreshes=sum(kept.copy.refreshes for kept in copies)
        + sum(each.num_made for each in frozen),
        values=tuple(listed.values()),
    )


def invalidate(model_or_tensor: torch.nn.Module | torch.Tensor | None = None) -> None:
    """Has copies made again before their next use.

    Args:
        model_or_tensor: Whose copies; None for all.
    """
    tensors = _tensors_of(model_or_tensor)
    with CACHE.exclusive():
        for kept in list(CACHE.copies.values()):
            source = kept.source()
            if tensors is None or id(source) in tensors:
                kept.copy.invalidate()
        for values in list(CACHE.values):
            values.invalidate(tensors)


def _tensors_of(model_or_tensor: Any) -> set[int] | None:
    if model_or_tensor is None:
        return None
    if isinstance(model_or_tensor, torch.Tensor):
        return {id(part_of(model_or_tensor))}
    if isinstance(model_or_tensor, torch.nn.Module):
        parts = (*model_or_tensor.parameters(), *model_or_tensor.buffers())
        return {id(part_of(tensor)) for tensor in parts}
    raise TypeError(
        f"invalidate takes a module, a tensor or None, not {type(model_or_tensor).__name__}"
    )


def clear() -> None:
    """Drops all copies and stops watching their weights, until graphs are called again."""
    with CACHE.exclusive():
        for key, kept in list(CACHE.copies.items()):
            source = kept.source()
            if source is not None and source.device.type != "meta":
                engine().unwatch(source)
            if key in CACHE.copies:
                CACHE.drop(key)
        for values in list(CACHE.values):
            values.drop()


def set_limit(num_bytes: int | None) -> None:
    """Bounds the bytes that copies take together; past it, weights are cast per call.

    Args:
        num_bytes: The bound; None for none. Copies with the fewest hits go first; a newcomer
            takes the place of copies that were never hit, or is not kept.

    Raises:
        ValueError: The bound is negative.
    """
    if num_bytes is not None and num_bytes < 0:
        raise ValueError(f"the limit is a number of bytes or None, not {num_bytes}")
    with CACHE.exclusive():
        CACHE.limit = num_bytes
        if num_bytes is not None:
            CACHE.shrink(num_bytes)
