"""Notices every write that goes through PyTorch, without touching a byte.

A version counter misses ``fused=True`` optimizers and writes to ``.data``. A storage that
was made copy-on-write does not: anything that asks for a mutable pointer to it clears its
copy-on-write state, while reads leave it. So a storage is *armed* (lazily cloned, and the
clone dropped: no copy is made and the data does not move), and as long as it is armed its
bytes are those that were there when it was armed.

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
class _Storage:
    ref: StorageWeakRef
    generation: int


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    """A weak reference, which also keeps the storage's identity from being reused."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_expired(storage: _Storage) -> bool:
    return bool(storage.ref.expired())  # type: ignore[no-untyped-call]


class StorageWatch:
    """Generation numbers of storages, held weakly.

    Attributes:
        epoch: Raised before a storage is armed for the first time, or again after a write.
            While it stands, an armed storage at a known address is the one that was known
            there, with the bytes that it had: no other user of it consumed a write.
            Whoever derives something from watched bytes raises it when that changes.
    """

    def __init__(self) -> None:
        """Watches nothing."""
        self.epoch = 0
        self._storages: dict[int, _Storage] = {}
        self._generations = itertools.count(1)

    def generation(self, tensor: torch.Tensor) -> int | None:
        """The generation of a tensor's bytes, armed from here on; None if unwatchable.

        Two equal answers mean that nothing was written in between. Not thread-safe.
        """
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None or _is_expired(known):
            self.epoch += 1
            if not arm(tensor):
                return None
            self._forget_expired()
            known = _Storage(_weak(storage), next(self._generations))
            self._storages[storage._cdata] = known
        elif not is_armed(tensor):
            known.generation = next(self._generations)
            self.epoch += 1
            if not arm(tensor):
                del self._storages[storage._cdata]
                return None
        return known.generation

    def _forget_expired(self) -> None:
        """Drops dead storages now and then, at a cost that stays linear overall."""
        if len(self._storages) & (len(self._storages) - 1) == 0:
            self._storages = {k: s for k, s in self._storages.items() if not _is_expired(s)}
