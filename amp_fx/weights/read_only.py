"""Checks that compiled code writes neither to cached values nor to weights (``AMP_FX_CHECK=1``).

The check needs no list of the ways in which inductor may reuse memory; see
Note [Cached values are read-only] in ``weights.pack``.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import StaleWeightError
from amp_fx.weights.cache_entry import computing_values, read_only, same_bits
from amp_fx.weights.store import STORE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amp_fx.weights.cache_entry import CacheEntry

CHECK_ENVIRONMENT = "AMP_FX_CHECK"

ADVICE = "report this as a bug of amp_fx; options={'weight_cache': False} avoids it"


def is_checking() -> bool:
    """Returns True if the environment asks for checks."""
    return os.environ.get(CHECK_ENVIRONMENT) == "1"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Copies of a cached value and of its weights.

    Attributes:
        computation: Number of the computation of the value.
        value: A tensor or a tuple of tensors.
        weights: The weights.
    """

    computation: int
    value: Any
    weights: tuple[torch.Tensor, ...]


_SNAPSHOTS: weakref.WeakKeyDictionary[CacheEntry, Snapshot] = weakref.WeakKeyDictionary()


def check_values(culprit: str) -> None:
    """Compares all cached values of the process with copies, and copies new values.

    Args:
        culprit: What ran since the latest check.

    Raises:
        StaleWeightError: A value changed without being computed again, or a weight without
            a signal that reports the write.
    """
    with STORE.locked(), computing_values():
        for entry in list(STORE.entries.values()):
            weights = entry.weights()
            if entry.spec.is_alias or weights is None or not entry.is_fresh():
                continue  # a stale value is not used, and may be a view of a weight
            snapshot = _SNAPSHOTS.get(entry)
            if snapshot is None or snapshot.computation != entry.slot.made:
                _SNAPSHOTS[entry] = Snapshot(entry.slot.made, copied(entry.value), copied(weights))
                continue
            names = ", ".join(entry.spec.names)
            if not same_bits(snapshot.value, copied(entry.value)):
                del _SNAPSHOTS[entry]
                ops = ", ".join(entry.spec.ops)
                raise StaleWeightError(
                    f"{culprit} wrote to the cached value of {names} of {entry.owner} ({ops}): "
                    f"{ADVICE}"
                )
            if not same_bits(snapshot.weights, copied(weights)):
                del _SNAPSHOTS[entry]
                raise StaleWeightError(
                    f"{culprit} wrote to {names} of {entry.owner} where PyTorch cannot see it: "
                    f"{ADVICE}"
                )


def check_weights(
    names: Sequence[str], weights: Iterable[torch.Tensor], copies: Iterable[Any], owner: str
) -> None:
    """Compares weights with copies from before a call.

    Raises:
        StaleWeightError: A weight changed.
    """
    with computing_values():
        pairs = [(copied(weight), copy) for weight, copy in zip(weights, copies, strict=True)]
    for name, (now, before) in zip(names, pairs, strict=True):
        if not same_bits(now, before):
            raise StaleWeightError(
                f"compiled code wrote to {name} of {owner}, which the program does not write: "
                f"{ADVICE}"
            )


def copied(value: Any) -> Any:
    """Returns a copy of a tensor or of a tuple of tensors; packed weights as plain tensors."""
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    if value.layout is not torch.strided:
        return value.to_dense()
    return read_only(value).clone()  # a read of a weight could count as a write
