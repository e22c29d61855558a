"""Stores the tensors of the reference program.

A tensor in the reference dtype that depends on no low op is its own shadow. Other tensors have a
second storage with the same number of elements. A view of the first storage has the same strides
and offset in the second one, so views and writes in place need no special case.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.observe.storages import Marks
from amp_fx.torch_private.autograd import neg_view

if TYPE_CHECKING:
    from amp_fx.numerics.measures import Measures


@dataclasses.dataclass
class ShadowEntry:
    """The facts about one storage.

    Attributes:
        shadow: The second storage; None if the storage is its own shadow.
        origin: The number of the record of the op that wrote it last; -1 for an input.
        measures: The measures of that write; None if it has no error.
    """

    shadow: torch.UntypedStorage | None = None
    origin: int = -1
    measures: Measures | None = None


class Shadows:
    """The shadows of all storages of one run."""

    def __init__(self) -> None:
        self._entries: Marks[ShadowEntry] = Marks()

    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor in its dtype in the reference; the same object if it has that dtype."""
        dtype = wide_dtype(tensor.dtype)
        return tensor if dtype == tensor.dtype else tensor.to(dtype)

    def is_low(self, dtype: torch.dtype) -> bool:
        """Returns True if a dtype is less precise than the reference."""
        return wide_dtype(dtype) != dtype

    def entry(self, tensor: torch.Tensor) -> ShadowEntry | None:
        """Returns the facts about a tensor's storage; None if there are none."""
        return self._entries.get(tensor)

    def note(self, tensor: torch.Tensor) -> ShadowEntry:
        """Returns the facts about a tensor's storage; adds an entry if there is none."""
        found = self._entries.get(tensor)
        if found is None:
            found = ShadowEntry()
            self._entries.put(tensor, found)
        return found

    def has_diverged(self, tensor: torch.Tensor) -> bool:
        """Returns True if a tensor has a shadow that is not itself."""
        found = self.entry(tensor)
        return found is not None and found.shadow is not None and _fits(found, tensor)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the shadow of a tensor: itself, a view of a second storage, or a wide copy."""
        found = self.entry(tensor)
        if found is None or found.shadow is None or not _fits(found, tensor):
            return self.widened(tensor)
        return _view(found.shadow, tensor, wide_dtype(tensor.dtype))

    def writable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the shadow of a tensor that an op writes in place; it is never the tensor."""
        found = self.note(tensor)
        if found.shadow is None or not _fits(found, tensor):
            self._begin(found, tensor, is_filled=True)
        assert found.shadow is not None
        return _view(found.shadow, tensor, wide_dtype(tensor.dtype))

    def put(self, tensor: torch.Tensor, value: torch.Tensor, *, is_fresh: bool) -> None:
        """Sets the shadow of a tensor; without a copy if ``is_fresh``: the value has no alias."""
        found = self.note(tensor)
        dtype = wide_dtype(tensor.dtype)
        if is_fresh and _has_same_layout(tensor, value) and value.dtype == dtype:
            found.shadow = value.untyped_storage()
            return
        covers = tensor.numel() * tensor.dtype.itemsize == tensor.untyped_storage().nbytes()
        if found.shadow is None or not _fits(found, tensor):
            self._begin(found, tensor, is_filled=not covers)
        assert found.shadow is not None
        _view(found.shadow, tensor, dtype).copy_(value)

    def forget(self, tensor: torch.Tensor) -> None:
        """Makes a tensor its own shadow."""
        found = self.entry(tensor)
        if found is not None:
            found.shadow = None

    def _begin(self, found: ShadowEntry, tensor: torch.Tensor, *, is_filled: bool) -> None:
        storage = tensor.untyped_storage()
        dtype = wide_dtype(tensor.dtype)
        size = storage.nbytes() // tensor.dtype.itemsize
        if is_filled:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat.set_(storage, 0, (size,), (1,))
            found.shadow = flat.to(dtype, copy=True).untyped_storage()
        else:
            found.shadow = torch.empty(size, dtype=dtype, device=tensor.device).untyped_storage()


@functools.cache
def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in the reference, which differs for less precise floating-point dtypes."""
    if dtype.is_complex:
        return torch.complex64 if dtype == torch.complex32 else dtype
    is_low = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    return torch.float32 if is_low else dtype


def _fits(found: ShadowEntry, tensor: torch.Tensor) -> bool:
    """Returns True if a shadow has one element for each of a tensor's storage.

    A view with another dtype of the same bytes has another number of elements.
    """
    assert found.shadow is not None
    size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return size == found.shadow.nbytes() // wide_dtype(tensor.dtype).itemsize


def _view(storage: torch.UntypedStorage, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    view = view.conj() if tensor.is_conj() else view
    return neg_view(view) if tensor.is_neg() else view


def _has_same_layout(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        tensor.storage_offset() == value.storage_offset() == 0
        and tensor.size() == value.size()
        and tensor.stride() == value.stride()
        and tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        == value.untyped_storage().nbytes() // value.dtype.itemsize
    )


aten = torch.ops.aten

HALF_TO_FLOAT = (aten._softmax.default, aten._log_softmax.default)
"""Ops with an argument ``half_to_float``, which wide inputs do not support."""


def dropped_out(
    shadow: torch.Tensor, args: tuple[Any, ...], mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the results of ``native_dropout`` of a shadow, with the mask of the low program."""
    probability, is_training = args[1], args[2]
    if is_training is False:
        return shadow.clone(), mask
    scale = 1 / (1 - probability) if probability < 1 else 0.0
    return shadow * mask * scale, mask
