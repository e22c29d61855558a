"""Keeps one low-precision copy per (weight, dtype) and refreshes it when it goes stale.

Graphs whose weight casts were taken out (``keep_weight_casts``) get the copies as inputs.
All graphs of a process share them. A copy is refreshed, in place and together with all
other stale ones of the call, before the first call after a write to its weight; how
writes are noticed is told in ``amp_fx.weights.storage_watch``. What nothing can notice is a write
through a NumPy array or another alias outside PyTorch that was taken before the first
call: after such a write call ``invalidate()``.

Use::

    amp_fx.weight_cache.stats()            # entries, bytes, hits, refreshes
    amp_fx.weight_cache.invalidate(model)  # refresh its copies at the next call
    amp_fx.weight_cache.clear()            # drop all copies
    amp_fx.weight_cache.set_limit(2**30)   # bytes that copies may take together
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.weights.kept_copies import CACHE, drop

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amp_fx.weights.kept_copies import KeptCopy


@dataclasses.dataclass(frozen=True)
class Stats:
    """What the cache holds and did.

    Attributes:
        entries: Number of copies.
        bytes: Bytes that they take.
        hits: Times that a call found a copy fresh.
        refreshes: Times that a copy was made or made again.
        by_model: The same, by the function (and file) whose graph asked first.
    """

    entries: int
    bytes: int
    hits: int
    refreshes: int
    by_model: dict[str, Stats] = dataclasses.field(default_factory=dict)


def stats() -> Stats:
    """Counts of the copies that are alive."""
    with CACHE.lock:
        copies = list(CACHE.copies.values())
    owners = {copy.owner for copy in copies}
    by_model = {o: _count(c for c in copies if c.owner == o) for o in sorted(owners)}
    return dataclasses.replace(_count(copies), by_model=by_model)


def _count(copies: Iterable[KeptCopy]) -> Stats:
    copies = list(copies)
    return Stats(
        entries=len(copies),
        bytes=sum(copy.num_bytes for copy in copies),
        hits=sum(copy.num_uses for copy in copies),
        refreshes=sum(copy.refreshes for copy in copies),
    )


_INVALID = ()
"""What no weight was ever seen as, while None says that a copy was never filled."""


def invalidate(model_or_tensor: torch.nn.Module | torch.Tensor | None = None) -> None:
    """Has copies made again before their next use.

    Args:
        model_or_tensor: Whose copies; None for all.
    """
    tensors = _tensors_of(model_or_tensor)
    with CACHE.lock:
        for copy in list(CACHE.copies.values()):
            source = copy.source()
            if tensors is None or id(source) in tensors:
                copy.seen = _INVALID
                for plan in list(copy.plans):
                    plan.forget()


def _tensors_of(model_or_tensor: Any) -> set[int] | None:
    if model_or_tensor is None:
        return None
    if isinstance(model_or_tensor, torch.Tensor):
        return {id(model_or_tensor)}
    if isinstance(model_or_tensor, torch.nn.Module):
        parts = (*model_or_tensor.parameters(), *model_or_tensor.buffers())
        return {id(tensor) for tensor in parts}
    raise TypeError(
        f"invalidate takes a module, a tensor or None, not {type(model_or_tensor).__name__}"
    )


def clear() -> None:
    """Drops all copies and stops watching their weights, until graphs are called again.

    Call it before resizing the storage of a weight (``untyped_storage().resize_``), which
    torch refuses for a storage that is watched.
    """
    with CACHE.lock:
        for key, copy in list(CACHE.copies.items()):
            source = copy.source()
            if source is not None and source.device.type != "meta":
                source.data_ptr()  # asks for a mutable pointer, which disarms
            drop(copy, key)


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
    with CACHE.lock:
        CACHE.limit = num_bytes
        CACHE.make_room(0, list(CACHE.copies.values()))
