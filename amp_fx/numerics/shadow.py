"""Stores the tensors of the reference program, and describes ops.

A tensor in the reference dtype that depends on no low op is its own shadow. Other tensors have a
second storage with the same number of elements. A view of the first storage has the same strides
and offset in the second one, so views and writes in place need no special case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, cast

import torch

from amp_fx.explanation.running import leaf_tensors
from amp_fx.numerics.storages import Marks
from amp_fx.torch_private.autocast import DisableAutocast
from amp_fx.torch_private.autograd import DispatchBelowAutograd, neg_view
from amp_fx.torch_private.modes import DisableTorchFunction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.torch_private.ops import OpOverload


def number_of(node: Any) -> int:
    """Returns the number of a node of autograd."""
    return cast("int", node._sequence_nr())


def is_custom(node: Any) -> bool:
    """Returns True if a node of autograd is that of a custom function."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def compiled_with(step: Any) -> tuple[dict[str, Any], bool | None]:
    """Returns the options and ``dynamic`` with which amp_fx compiled a program."""
    backend = backend_of(step)
    if backend is None:
        return {}, None
    given = {name: value for name, value in backend.kwargs.items() if value is not None}
    return {**given.pop("options", {}), **given}, backend.dynamic


def backend_of(step: Any) -> Any:
    """Returns the amp_fx backend that ``torch.compile`` got for a program; None if it got none.

    Relies on the context in compiled modules and in the closures of compiled functions, and on the
    attribute ``_torchdynamo_orig_backend`` of its ``callback``.
    """
    compiled = step
    while (contexts := _contexts(compiled)) == [] and hasattr(compiled, "__wrapped__"):
        compiled = compiled.__wrapped__
    for context in contexts:
        backend = context.callback
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        if getattr(backend, "compiler_name", None) == "amp_fx":
            return backend
    return None


def _contexts(compiled: Any) -> list[Any]:
    cells = getattr(compiled, "__closure__", None) or ()
    known = [vars(compiled).get("dynamo_ctx")] if isinstance(compiled, torch.nn.Module) else []
    known += [cell.cell_contents for cell in cells]
    return [each for each in known if hasattr(each, "callback")]


@dataclasses.dataclass
class ShadowEntry:
    """The facts about one storage.

    Attributes:
        shadow: The second storage; None if the storage is its own shadow.
        origin: The number of the record of the op that wrote it last; -1 for an input.
        error: The relative error after that write.
    """

    shadow: torch.UntypedStorage | None = None
    origin: int = -1
    error: float = 0.0


class Shadows:
    """The shadows of all storages of one run."""

    def __init__(self, reference: torch.dtype) -> None:
        self.reference = reference
        self._entries: Marks[ShadowEntry] = Marks()

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the shadow of a tensor."""
        return wide_dtype(dtype, self.reference)

    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor in its dtype in the reference; the same object if it has that dtype."""
        dtype = self.wide(tensor.dtype)
        return tensor if dtype == tensor.dtype else tensor.to(dtype)

    def is_low(self, dtype: torch.dtype) -> bool:
        """Returns True if a dtype is less precise than the reference."""
        return self.wide(dtype) != dtype

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
        return found is not None and found.shadow is not None and _fits(found, tensor, self)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the shadow of a tensor: itself, a view of a second storage, or a wide copy."""
        found = self.entry(tensor)
        if found is None or found.shadow is None or not _fits(found, tensor, self):
            return self.widened(tensor)
        return _view(found.shadow, tensor, self.wide(tensor.dtype))

    def writable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the shadow of a tensor that an op writes in place; it is never the tensor."""
        found = self.note(tensor)
        if found.shadow is None or not _fits(found, tensor, self):
            self._begin(found, tensor, is_filled=True)
        assert found.shadow is not None
        return _view(found.shadow, tensor, self.wide(tensor.dtype))

    def put(self, tensor: torch.Tensor, value: torch.Tensor, *, is_fresh: bool) -> None:
        """Sets the shadow of a tensor; without a copy if ``is_fresh``: the value has no alias."""
        found = self.note(tensor)
        dtype = self.wide(tensor.dtype)
        if is_fresh and _has_same_layout(tensor, value) and value.dtype == dtype:
            found.shadow = value.untyped_storage()
            return
        covers = tensor.numel() * tensor.dtype.itemsize == tensor.untyped_storage().nbytes()
        if found.shadow is None or not _fits(found, tensor, self):
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
        dtype = self.wide(tensor.dtype)
        size = storage.nbytes() // tensor.dtype.itemsize
        if is_filled:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat.set_(storage, 0, (size,), (1,))
            found.shadow = flat.to(dtype, copy=True).untyped_storage()
        else:
            found.shadow = torch.empty(size, dtype=dtype, device=tensor.device).untyped_storage()


@functools.cache
def wide_dtype(dtype: torch.dtype, reference: torch.dtype) -> torch.dtype:
    """Returns the dtype in the reference, which differs for less precise floating-point dtypes."""
    if dtype.is_complex:
        other = reference.to_complex()
        return other if other.itemsize > dtype.itemsize else dtype
    if dtype.is_floating_point and dtype.itemsize < reference.itemsize:
        return reference
    return dtype


def is_tracked(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor has a storage of elements, so that it can have a shadow.

    Forward-mode gradients use zero tensors without a storage, and compute sizes on ``meta``.
    """
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    has_numbers = not tensor._is_zerotensor() and not tensor.is_meta
    return is_dense and has_numbers and not is_wrapped(tensor)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor is a subclass without a storage."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and hasattr(
        tensor, "__tensor_flatten__"
    )


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the only tensor inside of a subclass if it has the same sizes; else the tensor."""
    while is_wrapped(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = getattr(tensor, names[0])
        if len(names) != 1 or inner.shape != tensor.shape:
            break
        tensor = inner
    return tensor


def _fits(found: ShadowEntry, tensor: torch.Tensor, shadows: Shadows) -> bool:
    """Returns True if a shadow has one element for each of a tensor's storage.

    A view with another dtype of the same bytes has another number of elements.
    """
    assert found.shadow is not None
    size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return size == found.shadow.nbytes() // shadows.wide(tensor.dtype).itemsize


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

_EMPTY = tuple(
    getattr(aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "clone",
        "_unsafe_view",
        "unsafe_split",
        "cat",
        "stack",
        "gather",
        "index",
        "index_select",
        "embedding",
        "where",
        "masked_fill",
        "relu",
        "threshold",
        "neg",
        "abs",
        "flip",
        "roll",
        "constant_pad_nd",
        "repeat",
        "max_pool2d_with_indices",
        "sort",
        "topk",
        "max",
        "min",
    )
)
"""Ops that do not round: they move and choose elements."""


_SAVING = (
    "aten::native_",
    "aten::_native_",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::_scaled_dot_product_",
    "aten::_fused_rms_norm",
    "aten::_flash_",
    "aten::_efficient_",
)
"""Prefixes of ops whose results after the first are only saved for the backward."""


@dataclasses.dataclass(frozen=True)
class OpFacts:
    """The facts in the schema of an op.

    Attributes:
        name: ``"aten::addmm"``.
        writes: Positions and names of arguments that the op writes.
        is_view: True if the results are views of an input.
        is_random: True if the op draws random numbers.
        is_empty: True if the op allocates uninitialized memory.
        saves: True if results after the first are only saved for the backward.
    """

    name: str
    writes: tuple[tuple[int, str], ...]
    is_view: bool
    is_random: bool
    is_empty: bool
    saves: bool

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Returns the tensors that a call writes."""
        found = []
        for index, name in self.writes:
            value = args[index] if index < len(args) else kwargs.get(name)
            found += leaf_tensors(value)
        return found


@functools.cache
def facts_of(op: OpOverload) -> OpFacts:
    """Returns the facts about an op."""
    schema = op._schema
    arguments = list(enumerate(schema.arguments))
    writes = tuple(
        (position, argument.name)
        for position, argument in arguments
        if argument.name in _STATISTICS
        or (argument.alias_info is not None and argument.alias_info.is_write)
    )
    returns = [result.alias_info for result in schema.returns]
    is_view = bool(returns) and not writes and all(alias is not None for alias in returns)
    return OpFacts(
        name=schema.name,
        writes=writes,
        is_view=is_view,
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        is_empty=op.overloadpacket in _EMPTY,
        saves=schema.name.startswith(_SAVING) and "backward" not in schema.name,
    )


_STATISTICS = ("running_mean", "running_var")
"""Arguments that kernels of batch normalization write, although their schemas do not say so."""


@contextlib.contextmanager
def below_everything() -> Iterator[None]:
    """Context manager in which autocast, autograd and function modes see no op."""
    with DisableAutocast(), DispatchBelowAutograd(), DisableTorchFunction():
        yield


def dropped_out(
    shadow: torch.Tensor, args: tuple[Any, ...], mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the results of ``native_dropout`` of a shadow, with the mask of the low program."""
    probability, is_training = args[1], args[2]
    if is_training is False:
        return shadow.clone(), mask
    scale = 1 / (1 - probability) if probability < 1 else 0.0
    return shadow * mask * scale, mask
