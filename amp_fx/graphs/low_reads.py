"""Which weights a graph reads through casts to one low dtype, and through nothing else."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from amp_fx.dtypes import is_low
from amp_fx.graphs.metadata import VERSION
from amp_fx.graphs.values import is_written, storage_id, tensors_in, value_of, version_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

_aten = torch.ops.aten

VIEWS = frozenset(
    (
        *(_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.mT.default),
        *(_aten.view.default, _aten.reshape.default, _aten.flatten.using_ints),
        *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
        *(_aten.slice.Tensor, _aten.select.int, _aten.narrow.default),
        *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.split.sizes),
        *(_aten.chunk.default, _aten.unbind.int, _aten.detach.default, _aten.alias.default),
    )
)
"""Ops that give a view of their first argument, in whatever dtype it has."""

_CASTS = (_aten._to_copy.default, _aten.to.dtype)


def low_reads(graph: fx.Graph, groups: Sequence[Sequence[fx.Node]]) -> dict[fx.Node, torch.dtype]:
    """The weights that could be stored in a low dtype with no number changed.

    A weight is read low if each of its readers casts it, or a view of it, to one low dtype, and
    the cast gives the layout that the stored weight would have; neither is written to, and no
    output may be either of them.

    Args:
        graph: A graph whose nodes have values.
        groups: Placeholders that share a storage: either all of a group can be, or none.

    Returns:
        The dtype of each, those that nobody reads left out unless they share a storage.
    """
    handed_out = {
        storage_id(tensor)
        for node in graph.output_node().all_input_nodes
        for tensor in tensors_in(value_of(node))
    }
    found: dict[fx.Node, torch.dtype] = {}
    for group in groups:
        dtypes = {dtype for node in group for dtype in _dtypes_read(node, handed_out)}
        if len(dtypes) == 1:
            [dtype] = dtypes
            if dtype is not None:
                found.update(dict.fromkeys(group, dtype))
    return found


def _dtypes_read(weight: fx.Node, handed_out: set[int]) -> set[torch.dtype | None]:
    """The low dtypes that a weight is read in; None among them for any other way of reading."""
    if is_written(weight) or not _is_float32(weight):
        return {None} if weight.users else set()
    casts, others = casts_of(weight)
    if others:
        return {None}
    return {value_of(cast).dtype if _may_go(cast, handed_out) else None for cast in casts}


def _is_float32(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def casts_of(weight: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The casts to a low dtype that read a weight or views of it, and its other readers."""
    casts: list[fx.Node] = []
    others: list[fx.Node] = []
    for user in weight.users:
        if _is_low_cast(user):
            casts.append(user)
        elif is_view(user):
            more = casts_of(user)
            casts += more[0]
            others += more[1]
        else:
            others.append(user)
    return casts, others


def is_view(node: fx.Node) -> bool:
    """Whether a node gives a view of its first argument, or one out of a tuple of views."""
    return node.target in VIEWS or node.target is operator.getitem


def _is_low_cast(node: fx.Node) -> bool:
    """Whether a node only casts its input, to a low dtype: a cast of ours or of the program."""
    value = value_of(node)
    if node.target not in _CASTS or not isinstance(value, torch.Tensor) or not is_low(value.dtype):
        return False
    is_plain = set(node.kwargs) <= {"dtype", "non_blocking"} and len(node.args) <= 2
    return is_plain and value.device == value_of(node.all_input_nodes[0]).device


def _may_go(cast: fx.Node, handed_out: set[int]) -> bool:
    """Whether what a cast gives may be the weight itself, or a view of it."""
    value, source = value_of(cast), value_of(cast.all_input_nodes[0])
    if version_of(value) != VERSION.get(cast) or storage_id(value) in handed_out:
        return False
    return bool(value.stride() == source.stride())
