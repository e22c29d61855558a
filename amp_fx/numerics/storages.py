"""Marks on the storages of tensors, which keep no storage alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage: equal for tensors that share one."""
    return cast("int", tensor.untyped_storage()._cdata)


class StorageReference:
    """A weak reference to a storage; as long as it is held no other one has its address.

    Relies on ``StorageWeakRef``, and on what is weakly referred to keeping its place in memory.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_dead(self) -> bool:
        """Returns True if nobody else holds the storage."""
        return bool(self._reference.expired())


SWEEP_EVERY = 64
"""Marks after which those of dead storages are removed."""


class Marks(Generic[T]):
    """A dictionary whose keys are storages, and which keeps none of them alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageReference, T]] = {}
        self._num_new = 0

    def has(self, tensor: torch.Tensor) -> bool:
        """Returns True if a tensor's storage has a mark."""
        return address_of(tensor) in self._entries

    def get(self, tensor: torch.Tensor, default: T | None = None) -> T | None:
        """Returns the mark of a tensor's storage, or a default."""
        found = self._entries.get(address_of(tensor))
        return default if found is None else found[1]

    def put(self, tensor: torch.Tensor, mark: T) -> None:
        """Sets the mark of a tensor's storage."""
        self._num_new += 1
        if self._num_new >= SWEEP_EVERY:
            self._num_new = 0
            for address in [a for a, (alive, _) in self._entries.items() if alive.is_dead()]:
                del self._entries[address]
        reference = StorageReference(tensor.untyped_storage())
        self._entries[address_of(tensor)] = (reference, mark)

    def pop(self, tensor: torch.Tensor) -> None:
        """Removes the mark of a tensor's storage."""
        self._entries.pop(address_of(tensor), None)
