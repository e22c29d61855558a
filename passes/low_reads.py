"""Finds the weights of a rewritten graph that are only read through casts to one low dtype.

Storing such a weight in the low dtype, or gathering its shards in the low dtype, changes no bits.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from amp_fx.dtypes import is_low
from amp_fx.graphs.bodies import bodies_of, operands_of
from amp_fx.graphs.metadata import HAS_REWRITTEN_BODIES, OPAQUE, VALUE, VERSION
from amp_fx.graphs.values import storage_id, tensors_in, version_of
from amp_fx.policies.calls import TO_COPY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx


@dataclasses.dataclass(frozen=True)
class LowRead:
    """The casts through which one weight is read.

    Attributes:
        dtype: The dtype of all casts.
        num_casts: The number of casts.
        is_direct: True if all casts are of the weight itself, False if some are of a view.
    """

    dtype: torch.dtype
    num_casts: int
    is_direct: bool

    @property
    def is_one_cast(self) -> bool:
        """True if gradients are added in the low dtype, as for a weight that is stored low.

        Gradients of several casts, or of a view that repeats elements, are added in float32.
        """
        return self.is_direct and self.num_casts == 1


def low_reads(gm: fx.GraphModule) -> dict[fx.Node, LowRead]:
    """Returns the inputs and attributes of a graph that are only read in a low dtype.

    A view is not a reader, but the users of the view are, because casts and views commute. A
    higher-order op whose bodies were rewritten is not a reader either, but the nodes in its bodies
    are. Every other user is a reader: opaque nodes, outputs, writes and casts to another dtype.

    Args:
        gm: A graph after the passes, whose casts are nodes and whose nodes have values.

    Returns:
        Placeholders and ``get_attr`` nodes, with their reads. Unused nodes are omitted.
    """
    nodes = [*gm.graph.find_nodes(op="placeholder"), *gm.graph.find_nodes(op="get_attr")]
    reads = {node: _read_of(gm, node) for node in nodes if _may_be_low(node)}
    return {node: read for node, read in reads.items() if read is not None}


def _may_be_low(node: fx.Node) -> bool:
    """Returns True for a strided float32 tensor that the graph does not write to."""
    value = VALUE.get(node)
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return False
    has_version = value.layout is torch.strided and VERSION.is_on(node)
    return has_version and version_of(value) == VERSION.of(node)


def _read_of(gm: fx.GraphModule, node: fx.Node) -> LowRead | None:
    """Returns the reads of a weight if all of them are casts to one low dtype."""
    casts = dict(readers(gm, node, is_direct=True))
    dtypes = {_cast_dtype(cast) for cast in casts}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if dtype is None or not is_low(dtype):
        return None
    return LowRead(dtype, len(casts), all(casts.values()))


def readers(
    gm: fx.GraphModule, node: fx.Node, *, is_direct: bool = True
) -> Iterator[tuple[fx.Node, bool]]:
    """Yields the readers of a tensor, with True if they read the tensor itself and not a view.

    Views and bodies of higher-order ops are followed.
    """
    for user in node.users:
        if HAS_REWRITTEN_BODIES.is_on(user):
            yield from _readers_in_bodies(gm, user, node, is_direct=is_direct)
        elif is_view(user, node):
            yield from readers(gm, user, is_direct=False)
        else:
            yield user, is_direct


def _readers_in_bodies(
    gm: fx.GraphModule, call: fx.Node, node: fx.Node, *, is_direct: bool
) -> Iterator[tuple[fx.Node, bool]]:
    positions = [i for i, operand in enumerate(operands_of(call)) if operand is node]
    for body in bodies_of(gm, call):
        placeholders = body.graph.find_nodes(op="placeholder")
        for position in positions:
            yield from readers(body, placeholders[position], is_direct=is_direct)


def is_view(user: fx.Node, node: fx.Node) -> bool:
    """Returns True if a node only returns views of another node.

    In-place ops count as views: the version of the tensor tells that they write to it.
    """
    if user.op == "output" or OPAQUE.is_on(user):
        return False
    source, results = tensors_in(VALUE.get(node)), tensors_in(VALUE.get(user))
    storages = {storage_id(tensor) for tensor in (*source, *results)}
    dtypes = {tensor.dtype for tensor in (*source, *results)}
    return bool(results) and len(storages) == len(dtypes) == 1


def _cast_dtype(reader: fx.Node) -> torch.dtype | None:
    """Returns the dtype of a cast, or None if the reader is not a cast."""
    if reader.target is torch.ops.aten.to.dtype and len(reader.args) == 2 and not reader.kwargs:
        return reader.args[1]  # type: ignore[return-value]
    if reader.target is not TO_COPY or set(reader.kwargs) != {"dtype"}:
        return None
    return reader.kwargs["dtype"]  # type: ignore[return-value]
