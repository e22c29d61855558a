"""Casts tensors before they are gathered, if all readers of the gathered tensor cast it.

Before:
    %whole = _c10d_functional.all_gather_into_tensor(%part, 2, "0")
    %wait  = _c10d_functional.wait_tensor(%whole)
    %low   = aten._to_copy(%wait, dtype=torch.bfloat16)
    %y     = aten.mm(%x, %low)
After:
    %narrow = aten._to_copy(%part, dtype=torch.bfloat16)
    %whole  = _c10d_functional.all_gather_into_tensor(%narrow, 2, "0")
    %wait   = _c10d_functional.wait_tensor(%whole)
    %y      = aten.mm(%x, %wait)

Left unchanged: collectives that add, because casts and additions do not commute; gathered tensors
with a reader that does not cast, such as an output that is saved for the backward.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from typing import ClassVar

import torch
from torch import fx

from amp_fx.graphs.casts import (
    WHOLE_VIEWS,
    is_narrowing_cast,
    is_reinterpreting,
    narrowing_cast,
    op_name,
    record_value,
)
from amp_fx.graphs.metadata import VALUE
from amp_fx.passes.base import PassResult

MOVING = frozenset(
    (
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::all_gather_into_tensor_coalesced",
        "_c10d_functional::all_to_all_single",
        "_c10d_functional::broadcast",
        "_dtensor::shard_dim_alltoall",
    )
)
"""Collectives that move elements. ``permute_tensor`` is an ``all_to_all_single``."""

_PARTS = ("cat", "clone", "expand", "select", "slice", "split", "split_with_sizes")
CARRYING = WHOLE_VIEWS | {"_c10d_functional::wait_tensor", *(f"aten::{name}" for name in _PARTS)}
"""Ops between a collective and a cast that only move elements."""


@dataclasses.dataclass(frozen=True)
class NarrowGathers:
    """Moves narrowing casts in front of collectives that move elements.

    This halves the communication and changes no bits. The pass runs on AOTAutograd's forward and
    backward graphs: in a captured graph, the cast would be differentiated, and the backward would
    add gradients in the low dtype.
    """

    name: ClassVar[str] = "narrow_gathers"
    ops: ClassVar[frozenset[str]] = MOVING

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``gathers_narrowed``."""
        counts: Counter[str] = Counter()
        # In reverse order, because a gather may read the result of another gather.
        for gather in reversed([n for n in gm.graph.nodes if op_name(n) in MOVING]):
            region = _read_through(gather)
            if region is not None:
                _narrow(gm.graph, gather, *region)
                counts["gathers_narrowed"] += 1
        return PassResult(counts)


def _read_through(gather: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """Returns the views and casts of a gathered tensor, or None if it has other readers."""
    views: dict[fx.Node, None] = {}
    casts: dict[fx.Node, None] = {}
    pending = [gather]
    while pending:
        for user in pending.pop().users:
            if is_narrowing_cast(user):
                casts[user] = None
            elif not _carries(user):
                return None
            elif user not in views:
                views[user] = None
                pending.append(user)
    region = {gather, *views}
    if any(
        _is_tensor(source) and source not in region for c in views for source in c.all_input_nodes
    ):
        return None  # an op combines the gathered tensor with another one
    if len({VALUE.of(cast).dtype for cast in casts}) != 1:
        return None
    return list(views), list(casts)


def _is_tensor(node: fx.Node) -> bool:
    return not isinstance(VALUE.get(node), (torch.SymInt, int))


def _carries(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return op_name(node) in CARRYING and not is_reinterpreting(node)


def _narrow(graph: fx.Graph, gather: fx.Node, views: list[fx.Node], casts: list[fx.Node]) -> None:
    """Casts the inputs of a collective and removes the casts after it."""
    dtype = VALUE.of(casts[0]).dtype
    narrowed: dict[fx.Node, fx.Node] = {}
    for source in gather.all_input_nodes:
        if source not in narrowed and isinstance(VALUE.get(source), torch.Tensor):
            with graph.inserting_before(gather):
                narrowed[source] = narrowing_cast(graph, source, dtype, like=casts[0])
    for source, cast in narrowed.items():
        gather.replace_input_with(source, cast)
    changed = {gather, *views}
    for node in [node for node in graph.nodes if node in changed]:
        record_value(node)
    for cast in casts:
        cast.replace_all_uses_with(cast.all_input_nodes[0])
        graph.erase_node(cast)
