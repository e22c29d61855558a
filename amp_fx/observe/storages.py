"""Marks on the storages of tensors, which do not extend the lifetime of a storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def address_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage, which views share."""
    return cast("int", tensor.untyped_storage()._cdata)


SWEEP_EVERY = 64
"""The number of new marks after which those of dead storages are removed."""


class Marks(Generic[T]):
    """Dictionary with weak references to storages as keys.

    Relies on ``StorageWeakRef``: no other storage has the address of one with a weak reference.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, T]] = {}
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
            for address in [a for a, (alive, _) in self._entries.items() if alive.expired()]:
                del self._entries[address]
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._entries[address_of(tensor)] = (reference, mark)

    def pop(self, tensor: torch.Tensor) -> None:
        """Removes the mark of a tensor's storage."""
        self._entries.pop(address_of(tensor), None)
