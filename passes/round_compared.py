"""Rounds low values that are compared with a reduction of themselves, in graphs of AOTAutograd.

Before and after, where inductor rounds the result of ``%s``:
    %s       = aten.div(%linear, 8.0)                   # bfloat16
    %largest = aten.amax(%s, [-1], True)
    %y       = aten.eq(%s, %largest)

Inductor computes low values in float32 and rounds what it stores: the result of the reduction, but
not the value that a generated kernel compares with it. They are then equal nowhere. Eager
code rounds every value.

Left alone: results of kernels that inductor does not generate, which are stored, and values that
only other values are compared with.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from amp_fx.dtypes import is_low
from amp_fx.graphs.bodies import graphs_in
from amp_fx.graphs.casts import op_name
from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.passes.base import PassResult
from amp_fx.torch_private.inductor_passes import ROUNDED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from amp_fx.graphs.conditions import Condition

_COMPARISONS = frozenset(f"aten::{name}" for name in ("eq", "ne", "ge", "gt", "le", "lt"))
_REDUCTIONS = frozenset(
    {
        "aten::amax",
        "aten::amin",
        "aten::kthvalue",
        "aten::max",
        "aten::mean",
        "aten::median",
        "aten::min",
        "aten::sort",
        "aten::sum",
        "aten::topk",
    }
)
_VIEWS = frozenset(
    {
        "aten::expand",
        "aten::permute",
        "aten::reshape",
        "aten::squeeze",
        "aten::t",
        "aten::transpose",
        "aten::unsqueeze",
        "aten::view",
    }
)


@dataclasses.dataclass(frozen=True)
class RoundCompared:
    """Marks the values that inductor must round before it compares them."""

    name: ClassVar[str] = "round_compared"
    ops: ClassVar[frozenset[str]] = _COMPARISONS
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``rounded_values``."""
        nodes = [node for graph in graphs_in(gm) for node in graph.nodes]
        compared = [node for node in nodes if _is_pointwise(node) and _is_compared(node)]
        for node in compared:
            node.meta[ROUNDED] = True
        return PassResult(Counter(rounded_values=len(compared)))


def _is_pointwise(node: fx.Node) -> bool:
    value = node.meta.get("val")
    tags = getattr(node.target, "tags", ())
    is_generated = node.op == "call_function" and torch.Tag.pointwise in tags
    return is_generated and isinstance(value, torch.Tensor) and is_low(value.dtype)


def _is_compared(node: fx.Node) -> bool:
    names = set(map(op_name, _users(node)))
    return not names.isdisjoint(_COMPARISONS) and not names.isdisjoint(_REDUCTIONS)


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the users of a node and of its views."""
    for user in node.users:
        yield user
        if op_name(user) in _VIEWS:
            yield from _users(user)
