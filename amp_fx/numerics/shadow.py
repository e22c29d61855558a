"""What tensors would be in the reference precision: a second value for each storage.

A tensor in the reference dtype that no low op has touched is its own shadow. Others have a second
storage of as many elements, in which every view of the first finds its part by strides and offset:
views and writes in place need no special case.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from amp_fx.numerics.torch_private import StorageReference, address_of

SWEEP_EVERY = 32
"""New storages after which shadows of dead ones are let go."""


@dataclasses.dataclass
class Entry:
    """What is known of one storage.

    Attributes:
        alive: A weak reference: as long as it is held no other storage has the address.
        shadow: The second storage; None where the first is its own shadow.
        ratio: Bytes of an element of the shadow for one of the storage.
        origin: The number of the record of the op that wrote it last; -1 for what came in.
        error: The relative error that it had then.
    """

    alive: StorageReference
    shadow: torch.UntypedStorage | None = None
    ratio: int = 1
    origin: int = -1
    error: float = 0.0


class Shadows:
    """The shadows of all storages of one run."""

    def __init__(self, reference: torch.dtype) -> None:
        self.reference = reference
        self._entries: dict[int, Entry] = {}
        self._num_new = 0

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the shadow of a tensor of some dtype."""
        return wide_dtype(dtype, self.reference)

    def is_low(self, dtype: torch.dtype) -> bool:
        """Whether a dtype is less precise than the reference."""
        return self.wide(dtype) != dtype

    def entry(self, tensor: torch.Tensor) -> Entry | None:
        """What is known of a tensor's storage; None for what came from outside."""
        return self._entries.get(address_of(tensor))

    def note(self, tensor: torch.Tensor) -> Entry:
        """The same, from now on known."""
        address = address_of(tensor)
        found = self._entries.get(address)
        if found is None:
            self._num_new += 1
            if self._num_new >= SWEEP_EVERY:
                self._sweep()
            found = self._entries[address] = Entry(StorageReference(tensor.untyped_storage()))
        return found

    def has_diverged(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a shadow that is not itself."""
        found = self.entry(tensor)
        return found is not None and found.shadow is not None and _fits(found, tensor, self)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shadow of a tensor: itself, a view of its second storage, or a wide copy."""
        found = self.entry(tensor)
        if found is None or found.shadow is None or not _fits(found, tensor, self):
            return widened(tensor, self.reference)
        return _view(found.shadow, tensor, self.wide(tensor.dtype))

    def writable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shadow of a tensor that will be written to in place: never itself."""
        found = self.note(tensor)
        if found.shadow is None or not _fits(found, tensor, self):
            self._begin(found, tensor, is_filled=True)
        assert found.shadow is not None
        return _view(found.shadow, tensor, self.wide(tensor.dtype))

    def put(self, tensor: torch.Tensor, value: torch.Tensor, *, is_fresh: bool) -> None:
        """Gives a tensor a shadow, kept as it is if ``is_fresh``: nothing else holds the value."""
        found = self.note(tensor)
        dtype = self.wide(tensor.dtype)
        if is_fresh and _has_same_layout(tensor, value) and value.dtype == dtype:
            found.shadow = value.untyped_storage()
            found.ratio = dtype.itemsize // tensor.dtype.itemsize
            return
        covers = tensor.numel() * tensor.dtype.itemsize == tensor.untyped_storage().nbytes()
        if found.shadow is None or not _fits(found, tensor, self):
            self._begin(found, tensor, is_filled=not covers)
        assert found.shadow is not None
        _view(found.shadow, tensor, dtype).copy_(value)

    def forget(self, tensor: torch.Tensor) -> None:
        """Makes a tensor its own shadow, as of now."""
        found = self.entry(tensor)
        if found is not None:
            found.shadow = None

    def num_bytes(self) -> int:
        """Memory of the shadows of what is alive."""
        self._sweep()
        return sum(e.shadow.nbytes() for e in self._entries.values() if e.shadow is not None)

    def _begin(self, found: Entry, tensor: torch.Tensor, *, is_filled: bool) -> None:
        storage = tensor.untyped_storage()
        dtype = self.wide(tensor.dtype)
        size = storage.nbytes() // tensor.dtype.itemsize
        if is_filled:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat.set_(storage, 0, (size,), (1,))
            found.shadow = flat.to(dtype, copy=True).untyped_storage()
        else:
            found.shadow = torch.empty(size, dtype=dtype, device=tensor.device).untyped_storage()
        found.ratio = dtype.itemsize // tensor.dtype.itemsize

    def _sweep(self) -> None:
        self._num_new = 0
        for address in [a for a, e in self._entries.items() if e.alive.is_dead()]:
            del self._entries[address]


def widened(tensor: torch.Tensor, reference: torch.dtype) -> torch.Tensor:
    """A tensor in its wide dtype; the same object if it has that already."""
    dtype = wide_dtype(tensor.dtype, reference)
    return tensor if dtype == tensor.dtype else tensor.to(dtype)


@functools.cache
def wide_dtype(dtype: torch.dtype, reference: torch.dtype) -> torch.dtype:
    """What a dtype becomes in the reference: only less precise floating-point ones change."""
    if dtype.is_complex:
        other = reference.to_complex()
        return other if other.itemsize > dtype.itemsize else dtype
    if dtype.is_floating_point and dtype.itemsize < reference.itemsize:
        return reference
    return dtype


def is_tracked(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage of elements that a shadow can be made for.

    Forward gradients begin with zeros that have none, and their formulas ask for sizes on ``meta``.
    """
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    has_numbers = not tensor._is_zerotensor() and not tensor.is_meta
    return is_dense and has_numbers and not is_wrapped(tensor)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass that stands for others: it has no storage of its own."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and hasattr(
        tensor, "__tensor_flatten__"
    )


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a subclass stands for, if it is one of the same sizes; else itself."""
    while is_wrapped(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = getattr(tensor, names[0])
        if len(names) != 1 or inner.shape != tensor.shape:
            break
        tensor = inner
    return tensor


def _fits(found: Entry, tensor: torch.Tensor, shadows: Shadows) -> bool:
    """Whether a tensor sees the elements that the shadow was made for, not their bytes."""
    return shadows.wide(tensor.dtype).itemsize == found.ratio * tensor.dtype.itemsize


def _view(storage: torch.UntypedStorage, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    view = view.conj() if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view


def _has_same_layout(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        tensor.storage_offset() == value.storage_offset() == 0
        and tensor.size() == value.size()
        and tensor.stride() == value.stride()
        and tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        == value.untyped_storage().nbytes() // value.dtype.itemsize
    )
