"""Facts about ops and tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, cast

import torch

from amp_fx.explanation.running import leaf_tensors
from amp_fx.torch_private.autocast import DisableAutocast
from amp_fx.torch_private.autograd import DispatchBelowAutograd
from amp_fx.torch_private.modes import DisableTorchFunction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.torch_private.ops import OpOverload

aten = torch.ops.aten

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


_STATISTICS = ("running_mean", "running_var")
"""Arguments that kernels of batch normalization write, although their schemas do not say so."""


_EMPTY = tuple(
    getattr(aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


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


def is_tracked(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor has a storage of elements, so that it can have a shadow.

    Forward-mode gradients use zero tensors without a storage, and compute sizes on ``meta``.
    """
    is_dense = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
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
        inner = inner_tensors(tensor)
        if len(inner) != 1 or inner[0].shape != tensor.shape:
            break
        tensor = inner[0]
    return tensor


def inner_tensors(tensor: Any) -> list[torch.Tensor]:
    """Returns the tensors inside of a subclass without a storage; DTensors also list a mesh."""
    names, _ = tensor.__tensor_flatten__()
    values = (getattr(tensor, name) for name in names)
    return [value for value in values if isinstance(value, torch.Tensor)]


def number_of(node: Any) -> int:
    """Returns the number of a node of autograd."""
    return cast("int", node._sequence_nr())


def is_custom(node: Any) -> bool:
    """Returns True if a node of autograd is that of a custom function."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


@contextlib.contextmanager
def below_everything() -> Iterator[None]:
    """Context manager in which autocast, autograd and function modes see no op."""
    with DisableAutocast(), DispatchBelowAutograd(), DisableTorchFunction():
        yield
