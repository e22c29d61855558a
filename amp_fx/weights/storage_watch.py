"""Notices writes to storages without C++: they are made copy-on-write.

Of use where ``native/watch.cpp`` cannot be built. Anything that asks such a storage for a
mutable pointer clears its copy-on-write state, while reads leave it. So a storage is *armed*
(lazily cloned, and the clone dropped: no copy is made and the data does not move), and as long
as it is armed its bytes are those that were there when it was armed; but for kernels that write
through pointers that they call constant (``write_signals``). Not safe next to other threads.

The state belongs to the storage and whoever arms it again consumes it, so that all users
of this module share one generation number per storage, raised when a write is noticed.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch.multiprocessing.reductions import StorageWeakRef

is_armed = torch._C._is_cow_tensor  # type: ignore[attr-defined]
"""Whether a tensor's storage was not written to since it was armed. Private to torch."""

storage_address_of = torch._C._data_address  # type: ignore[attr-defined]
"""The address of a tensor's storage (without the tensor's offset into it), read without
asking for a mutable pointer. Private to torch."""


def arm(tensor: torch.Tensor) -> bool:
    """Makes a tensor's storage copy-on-write; False where that is impossible.

    Storages that torch did not allocate itself (NumPy, mmap, shared memory) cannot be.
    Relies on ``torch._lazy_clone``, and on a storage staying copy-on-write, at its
    address, when its only clone dies.
    """
    try:
        torch._lazy_clone(tensor.detach())
    except RuntimeError:
        return False
    return bool(is_armed(tensor))


@dataclasses.dataclass
class Record:
    """What is known of one storage.

    Attributes:
        ref: The storage, held weakly, which keeps its identity from being used again.
        generation: A number that is another one after every write.
    """

    ref: StorageWeakRef
    generation: int


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_expired(record: Record) -> bool:
    return bool(record.ref.expired())  # type: ignore[no-untyped-call]


class StorageWatch:
    """Generation numbers of storages, held weakly."""

    def __init__(self) -> None:
        """Watches nothing."""
        self._records: dict[int, Record] = {}
        self._generations = itertools.count(1)

    def record(self, tensor: torch.Tensor) -> Record | None:
        """What is known of a tensor's storage; None if nothing is."""
        known = self._records.get(tensor.untyped_storage()._cdata)
        return None if known is None or _is_expired(known) else known

    def generation(self, tensor: torch.Tensor) -> int | None:
        """The generation of a tensor's bytes, armed from here on; None if unwatchable.

        Two equal answers mean that nothing was written in between. Not thread-safe.
        """
        known = self.record(tensor)
        is_known_as_it_is = known is not None and is_armed(tensor)
        if not is_known_as_it_is and not arm(tensor):
            return None
        if known is None:
            self._forget_expired()
            storage = tensor.untyped_storage()
            known = Record(_weak(storage), next(self._generations))
            self._records[storage._cdata] = known
        elif not is_known_as_it_is:
            known.generation = next(self._generations)
        return known.generation

    def raise_generation(self, tensor: torch.Tensor) -> None:
        """Takes a tensor for written, if its storage is known."""
        known = self.record(tensor)
        if known is not None:
            known.generation = next(self._generations)

    def share_record(self, other: torch.Tensor, tensor: torch.Tensor) -> None:
        """Takes what is known of a tensor's storage for what is known of another's."""
        known = self.record(tensor)
        if known is not None:
            self._records[other.untyped_storage()._cdata] = known

    def _forget_expired(self) -> None:
        """Drops dead storages now and then, at a cost that stays linear overall."""
        if len(self._records) & (len(self._records) - 1) == 0:
            for key, record in list(self._records.items()):
                if _is_expired(record):
                    self._records.pop(key, None)
