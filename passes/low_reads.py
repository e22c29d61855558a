"""Finds the weights of a rewritten graph that nothing reads but through casts to one low dtype.

Rounding a weight once and for all changes nothing for these: whoever reads them rounds them
himself. Such a weight may be stored low, or gathered low where it is sharded.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from amp_fx.graphs.bodies import bodies_of, is_rewritten, operands_of
from amp_fx.graphs.metadata import ISLAND, VERSION
from amp_fx.graphs.values import storage_id, tensors_in, value_of, version_of
from amp_fx.policies.calls import CAST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

LOW_DTYPES = (torch.bfloat16, torch.float16)
"""What a float32 weight may be stored in."""


@dataclasses.dataclass(frozen=True)
class LowRead:
    """Describes how all readers of one weight take it.

    Attributes:
        dtype: What each casts it to.
        num_casts: How many casts that are.
        is_direct: Whether each casts the weight itself; else some cast a view of it.
    """

    dtype: torch.dtype
    num_casts: int
    is_direct: bool

    @property
    def is_one_cast(self) -> bool:
        """True if gradients add up in the low dtype, as they would if it were stored low.

        Gradients of several casts, and of a view that repeats elements, add up in float32.
        """
        return self.is_direct and self.num_casts == 1


def low_reads(gm: fx.GraphModule) -> dict[fx.Node, LowRead]:
    """The inputs and attributes of a graph that are only read low.

    A view of a weight is no reader, but what reads the view is: rounding and taking a view
    commute. Nor is a higher-order op whose bodies were rewritten: the readers are in there.
    Anything else is one: an island, an output, a write, a cast to another dtype.

    Args:
        gm: A graph with its casts as nodes and their values recorded, as the passes leave it.

    Returns:
        For each such placeholder or ``get_attr`` node how it is read. Those that nothing reads
        are not among them.
    """
    nodes = [*gm.graph.find_nodes(op="placeholder"), *gm.graph.find_nodes(op="get_attr")]
    reads = {node: _read_of(gm, node) for node in nodes if _may_be_low(node)}
    return {node: read for node, read in reads.items() if read is not None}


def _may_be_low(node: fx.Node) -> bool:
    """Returns True if a node gives a dense float32 tensor that the graph does not write."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return False
    is_seen = value.layout is torch.strided and VERSION.is_on(node)
    return is_seen and version_of(value) == VERSION.of(node)


def _read_of(gm: fx.GraphModule, node: fx.Node) -> LowRead | None:
    """Returns how a weight is read, if that is low."""
    casts = dict(readers(gm, node, is_direct=True))
    dtypes = {_cast_dtype(cast) for cast in casts}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if dtype not in LOW_DTYPES:
        return None
    return LowRead(dtype, len(casts), all(casts.values()))


def readers(
    gm: fx.GraphModule, node: fx.Node, *, is_direct: bool = True
) -> Iterator[tuple[fx.Node, bool]]:
    """Yields the readers of a tensor, through views and in bodies, and if they take it itself."""
    for user in node.users:
        if is_rewritten(user):
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
    """Returns True if a node only gives views; a write to the weight shows in its version."""
    if user.op == "output" or ISLAND.is_on(user):
        return False
    source, results = tensors_in(value_of(node)), tensors_in(value_of(user))
    storages = {storage_id(tensor) for tensor in (*source, *results)}
    dtypes = {tensor.dtype for tensor in (*source, *results)}
    return bool(results) and len(storages) == len(dtypes) == 1


def _cast_dtype(reader: fx.Node) -> torch.dtype | None:
    """Returns the dtype that a reader casts to; None if it does anything but casting."""
    if reader.target is torch.ops.aten.to.dtype and len(reader.args) == 2 and not reader.kwargs:
        return reader.args[1]  # type: ignore[return-value]
    if reader.target is not CAST or set(reader.kwargs) != {"dtype"}:
        return None
    return reader.kwargs["dtype"]  # type: ignore[return-value]
