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
from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.passes.base import PassResult
from amp_fx.torch_private.inductor_passes import ROUNDED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from amp_fx.graphs.conditions import Condition

_aten = torch.ops.aten

_COMPARISONS = (_aten.eq, _aten.ne, _aten.ge, _aten.gt, _aten.le, _aten.lt)
_REDUCTIONS = (
    _aten.amax,
    _aten.amin,
    _aten.kthvalue,
    _aten.max,
    _aten.mean,
    _aten.median,
    _aten.min,
    _aten.sort,
    _aten.sum,
    _aten.topk,
)
_VIEWS = (
    _aten.expand,
    _aten.permute,
    _aten.reshape,
    _aten.squeeze,
    _aten.t,
    _aten.transpose,
    _aten.unsqueeze,
    _aten.view,
)


@dataclasses.dataclass(frozen=True)
class RoundCompared:
    """Marks the values that inductor must round before it compares them."""

    name: ClassVar[str] = "round_compared"
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
    packets = {getattr(user.target, "overloadpacket", None) for user in _users(node)}
    return not packets.isdisjoint(_COMPARISONS) and not packets.isdisjoint(_REDUCTIONS)


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the users of a node and of its views."""
    for user in node.users:
        yield user
        if getattr(user.target, "overloadpacket", None) in _VIEWS:
            yield from _users(user)
