"""Counts the bytes that ops read and write, one by one, as eager code runs them.

No fusion and no caches: each op that the dispatcher hands to a kernel reads its tensors from memory
and writes its results there. Views move nothing, and neither does what only takes memory
(``empty``). An expanded tensor is read once. What looks rows up reads as much as it gives, and
what is written without being read (``copy_``, ``out=``) is not counted as read. Fused optimizers
write gradients only where they unscale them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from amp_fx.graphs.values import storage_id, tensors_in
from amp_fx.policies.calls import bind, written_arguments

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._ops import OpOverload


class Moved(NamedTuple):
    """Bytes that are read and written."""

    read: int = 0
    written: int = 0

    def plus(self, other: Moved) -> Moved:
        """Both together."""
        return Moved(self.read + other.read, self.written + other.written)


LOOKUPS = frozenset(
    ("aten::embedding", "aten::gather", "aten::index", "aten::index_select", "aten::take")
)
"""Ops that read of their first argument only what they give."""

PARTIAL_WRITES = frozenset(
    (
        *("aten::index_add_", "aten::index_copy_", "aten::index_put_", "aten::_index_put_impl_"),
        *("aten::scatter_", "aten::scatter_add_"),
    )
)
"""Ops that touch of what they write to only as much as they are given."""

OVERWRITES = frozenset(
    (
        *("aten::bernoulli_", "aten::copy_", "aten::exponential_", "aten::fill_"),
        *("aten::index_copy_", "aten::index_put_", "aten::_index_put_impl_", "aten::normal_"),
        *("aten::random_", "aten::scatter_", "aten::uniform_", "aten::zero_"),
        *("aten::_foreach_copy_", "aten::_foreach_zero_"),
    )
)
"""In-place ops that do not read what they write to."""

FREE = frozenset(
    (
        *("aten::empty", "aten::empty_like", "aten::empty_permuted", "aten::empty_strided"),
        *("aten::new_empty", "aten::new_empty_strided"),
        *("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"),
    )
)
"""Ops that only take memory, or wait."""

NORMS = frozenset(("aten::native_batch_norm", "aten::native_group_norm", "aten::native_layer_norm"))
"""Ops whose statistics are at least as wide as their weights; fake kernels make them low."""


class TrafficMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what the ops that run inside read and write.

    Of tensor subclasses it is what happens to the tensors inside them: of a DTensor, on this rank.

    Attributes:
        moved: The sums so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = Moved()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op and counts it."""
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass(tensor) for tensor in tensors_in(args, kwargs)):
            return NotImplemented  # it comes back with what is inside
        result = self.run(func, args, kwargs)
        self.moved = self.moved.plus(moved_by(func, args, kwargs, result))
        return result

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op."""
        return func(*args, **kwargs)


def moved_by(func: OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> Moved:
    """Counts what one op reads and writes."""
    name = func._schema.name
    if func.is_view or name in FREE or torch.Tag.inplace_view in func.tags:
        return Moved()
    given, written = _by_use(func, args, kwargs)
    known = {storage_id(tensor) for tensor in (*given, *written)}
    made = [tensor for tensor in tensors_in(result) if storage_id(tensor) not in known]
    if not made and not written:
        return Moved()  # ``_unsafe_view`` and others that give what they got
    num_made, num_written = _sum(made), _sum(written)
    if name in LOOKUPS:
        return Moved(num_made + _sum(given[1:]), num_made)
    if name in NORMS:
        width = max(tensor.dtype.itemsize for tensor in (*given, *written))
        num_made = tensor_bytes(made[0]) + sum(num_elements(t) * width for t in made[1:])
    if name in PARTIAL_WRITES:
        num_written = min(num_written, max(map(tensor_bytes, given), default=0))
    is_out = any(argument.is_out for argument in func._schema.arguments)
    is_read = name not in OVERWRITES and not is_out
    return Moved(_sum(given) + is_read * num_written, num_made + num_written)


def _by_use(
    func: OpOverload, args: Any, kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that are only read, and those that are written to."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    given = {name: tensors_in(value) for name, value in bind(func, args, kwargs).items()}
    names = written_arguments(func)
    if not given.get("grad_scale"):
        names = [name for name in names if name != "grads"]  # as kernels have it
    for name, tensors in given.items():
        (written if name in names else read).extend(tensors)
    return read, written


def _sum(tensors: Iterable[torch.Tensor]) -> int:
    return sum(map(tensor_bytes, tensors))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Memory that the elements of a tensor lie in: those of an expanded one are there once."""
    if tensor.layout is not torch.strided:
        return num_bytes(tensor)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    sizes = (hint(size) for size, stride in pairs if not isinstance(stride, int) or stride)
    return int(math.prod(sizes)) * tensor.dtype.itemsize


def num_bytes(tensor: torch.Tensor) -> int:
    """Memory of a tensor's elements; symbolic sizes are taken as in the call at hand."""
    return num_elements(tensor) * tensor.dtype.itemsize


def num_elements(tensor: torch.Tensor) -> int:
    """Elements of a tensor, symbolic sizes as in the call at hand."""
    return int(math.prod(map(hint, tensor.shape)))


def hint(value: Any) -> Any:
    """A symbolic number as it is in the call at hand, 1 if unknown; anything else as it is."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    known = value.node.hint if value.node.has_hint() else None
    return 1 if known is None else known
