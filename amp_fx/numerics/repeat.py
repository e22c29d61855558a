"""Runs an op once more, in the reference precision."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from amp_fx.numerics.shadow import wide_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._ops import OpOverload

aten = torch.ops.aten

_HALF_TO_FLOAT = (aten._softmax.default, aten._log_softmax.default)
"""Ops that can be told to widen: they refuse that for what is wide already."""

_EMPTY = tuple(
    getattr(aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


MOVES = frozenset(
    f"aten::{name}"
    for name in (
        *(
            "clone",
            "_unsafe_view",
            "unsafe_split",
            "cat",
            "stack",
            "gather",
            "index",
            "index_select",
        ),
        *("embedding", "where", "masked_fill", "relu", "threshold", "neg", "abs", "flip", "roll"),
        *("constant_pad_nd", "repeat", "max_pool2d_with_indices", "sort", "topk", "max", "min"),
    )
)
"""Ops that round nothing: they move and choose."""


_SAVING = (
    *("aten::native_", "aten::_native_", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"),
    *("aten::_scaled_dot_product_", "aten::_fused_rms_norm", "aten::_flash_", "aten::_efficient_"),
)
"""How ops are called whose results but the first are for the backward alone."""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclasses.dataclass(frozen=True)
class OpFacts:
    """What the schema of an op says.

    Attributes:
        name: ``"aten::addmm"``.
        writes: Positions and names of arguments that it writes to.
        is_view: Whether it only looks at its input in another way.
        is_random: Whether it takes random numbers.
        is_empty: Whether it makes memory with nothing in it.
        saves: Whether its results but the first are for the backward alone.
    """

    name: str
    writes: tuple[tuple[int, str], ...]
    is_view: bool
    is_random: bool
    is_empty: bool
    saves: bool

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call writes to."""
        found = []
        for index, name in self.writes:
            value = args[index] if index < len(args) else kwargs.get(name)
            found += tensors_in(value)
        return found


@functools.cache
def facts_of(op: OpOverload) -> OpFacts:
    """What is known of an op."""
    schema = op._schema
    arguments = list(enumerate(schema.arguments))
    writes = tuple((i, a.name) for i, a in arguments if _is_written(a))
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
"""Arguments that kernels of batch normalization write to, though their schemas do not say so."""


def _is_written(argument: torch.Argument) -> bool:
    alias = argument.alias_info
    return argument.name in _STATISTICS or (alias is not None and alias.is_write)


def in_reference(
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    swap: Callable[[torch.Tensor], torch.Tensor],
    reference: torch.dtype,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with tensors swapped, and wide dtypes where it names low ones."""

    def change(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return swap(value)
        return wide_dtype(value, reference) if isinstance(value, torch.dtype) else value

    args, kwargs = pytree.tree_map(change, (args, kwargs))
    if op in _HALF_TO_FLOAT and len(args) == 3:
        args = (*args[:2], False)
    return args, kwargs


def names_low_dtype(args: tuple[Any, ...], kwargs: dict[str, Any], reference: torch.dtype) -> bool:
    """Whether a call asks for a dtype below the reference."""
    return any(
        isinstance(value, torch.dtype) and wide_dtype(value, reference) != value
        for value in (*args, *kwargs.values())
    )


@contextlib.contextmanager
def below_everything() -> Iterator[None]:
    """Neither autocast, nor autograd, nor function modes see what is run inside.

    Relies on ``_DisableAutocast``, ``_AutoDispatchBelowAutograd`` and ``DisableTorchFunction``.
    """
    with (
        torch._C._DisableAutocast(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C.DisableTorchFunction(),
    ):
        yield


def random_state(device: torch.device) -> Callable[[], None]:
    """Takes the state of the random numbers of a device; call what is returned to go back."""
    if device.type == "cpu":
        state = torch.get_rng_state()
        return lambda: torch.set_rng_state(state)
    module = getattr(torch, device.type)
    state = module.get_rng_state(device)
    return lambda: module.set_rng_state(state, device)


def python_random_state() -> Callable[[], None]:
    """Takes the states of ``random`` and of NumPy, if that is there; call it to go back."""
    numpy: Any = sys.modules.get("numpy")
    ours = random.getstate()
    theirs = numpy.random.get_state() if numpy is not None else None

    def go_back() -> None:
        random.setstate(ours)
        if theirs is not None:
            numpy.random.set_state(theirs)

    return go_back


def dropped_out(shadow: torch.Tensor, args: tuple[Any, ...], mask: torch.Tensor) -> torch.Tensor:
    """``native_dropout`` of a shadow, with the mask that the low program has drawn."""
    probability, is_training = args[1], args[2]
    if is_training is False:
        return shadow.clone()
    scale = 1 / (1 - probability) if probability < 1 else 0.0
    return shadow * mask * scale
