"""Moves casts of weights out of the bodies of higher-order ops.

Before:
    %y = higher_order.tag_activation_checkpoint(%body, %x, %weight)
    body(%x, %weight):
        %weight_bfloat16 = aten._to_copy(%weight, dtype=torch.bfloat16)
        ...
After:
    %weight_bfloat16 = aten._to_copy(%weight, dtype=torch.bfloat16)
    %y = higher_order.tag_activation_checkpoint(%body, %x, %weight, %weight_bfloat16)
    body(%x, %weight, %weight_bfloat16):
        ...

Left unchanged: casts of activations, because a checkpoint saves their memory; casts of weights that
the graph writes to; several casts of one weight in a body that eager autocast does not share.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

from amp_fx.graphs.bodies import (
    WITH_PLAIN_BODIES,
    append_operand,
    calls_of_bodies,
    drop_unread_operands,
    has_shared_body,
    is_reentrant_checkpoint,
    operands_of,
)
from amp_fx.graphs.casts import add_cast, inserted_cast
from amp_fx.graphs.conditions import SITES_KNOWN, VALUES_KNOWN
from amp_fx.graphs.metadata import CAPTURED, CAST, SITE, VALUE
from amp_fx.graphs.values import detect_fake_mode, is_written, set_value, update_value
from amp_fx.passes.base import PassResult
from amp_fx.passes.fold_casts import has_gradient, is_aliased, is_cached_by_eager

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import fx

    from amp_fx.graphs.conditions import Condition


@dataclasses.dataclass(frozen=True)
class HoistCasts:
    """Replaces casts inside bodies with operands that are cast outside.

    Outside the body, ``fold_casts`` can share the cast, as eager autocast does
    (Note [Sharing casts] in ``amp_fx/graphs/casts.py``), and ``amp_fx.weights`` can cache it across
    calls.

    Attributes:
        weights: Names of the placeholders that are weights. Their casts are hoisted even if eager
            autocast would not cache them.
    """

    name: ClassVar[str] = "hoist_casts"
    ops: ClassVar[frozenset[str]] = WITH_PLAIN_BODIES
    requires: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    ensures: ClassVar[tuple[Condition, ...]] = (SITES_KNOWN, VALUES_KNOWN)
    weights: tuple[str, ...] = ()

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``casts_hoisted``, also in nested bodies."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        weights = {id(VALUE.get(node)) for node in placeholders if node.name in self.weights}
        # Innermost bodies first.
        calls = calls_of_bodies(gm)
        num_hoisted = sum(_hoist_from(nodes, bodies, weights) for bodies, nodes in calls)
        return PassResult(Counter(casts_hoisted=num_hoisted))


def _hoist_from(
    nodes: Sequence[fx.Node], bodies: Sequence[fx.GraphModule], weights: set[int]
) -> int:
    """Hoists casts out of the bodies that ``nodes`` call, to before each of these nodes."""
    num_hoisted = 0
    added: dict[tuple[int, torch.dtype], list[fx.Node]] = {}
    operands = list(zip(*map(operands_of, nodes), strict=True))
    sources = {
        id(VALUE.get(given[0])): given for given in operands if all(map(_is_unwritten_input, given))
    }
    for index, body in enumerate(bodies):
        casts = [node for node in body.graph.nodes if _can_hoist(node)]
        num_casts = Counter(map(_key, casts))
        for cast in casts:
            key = _key(cast)
            given = sources.get(key[0])
            if given is None or not _has_cached_source(cast, given, weights):
                continue
            if num_casts[key] > 1 and not _is_shared(cast):
                continue
            if key not in added:
                outside = [
                    _cast_outside(n, source, cast) for n, source in zip(nodes, given, strict=True)
                ]
                for node, operand in zip(nodes, outside, strict=True):
                    append_operand(node, operand)
                added[key] = [_add_placeholder(b.graph, outside[0]) for b in bodies]
            cast.replace_all_uses_with(added[key][index])
            body.graph.erase_node(cast)
            num_hoisted += 1
    if added and has_shared_body(nodes[0]):
        drop_unread_operands(nodes, bodies[0])
    return num_hoisted


def _is_unwritten_input(operand: Any) -> bool:
    return getattr(operand, "op", None) == "placeholder" and not is_written(operand)


def _can_hoist(node: fx.Node) -> bool:
    if inserted_cast(node) is None or is_aliased(node):
        return False
    return not any(user.op == "output" for user in node.users)


def _has_cached_source(cast: fx.Node, sources: Sequence[fx.Node], weights: set[int]) -> bool:
    """Returns True if each call casts a weight, or a tensor whose cast eager autocast caches.

    Eager autocast caches the cast of all calls or of none (``shared_bodies``).
    """
    if has_gradient(cast) and is_cached_by_eager(cast):
        return True
    return all(id(VALUE.get(source)) in weights for source in sources)


def _key(cast: fx.Node) -> tuple[int, torch.dtype]:
    return id(VALUE.of(cast.all_input_nodes[0])), VALUE.of(cast).dtype


def _is_shared(cast: fx.Node) -> bool:
    """Returns True if equal casts may be shared without adding gradients in another dtype."""
    return not has_gradient(cast) or is_cached_by_eager(cast)


def _cast_outside(node: fx.Node, source: fx.Node, cast: fx.Node) -> fx.Node:
    graph = node.graph
    with graph.inserting_before(node):
        outside = add_cast(graph, source, VALUE.of(cast).dtype, CAST.of(cast).reason)
    site = SITE.of(cast)
    # A reentrant checkpoint differentiates its own recomputation, for which eager autocast's cache
    # is empty: its cast must not be shared with casts outside.
    SITE.put(outside, site.without_cast_cache() if is_reentrant_checkpoint(node) else site)
    update_value(outside, detect_fake_mode(graph), is_grad_enabled=SITE.of(cast).is_grad_enabled)
    return outside


def _add_placeholder(graph: fx.Graph, outside: fx.Node) -> fx.Node:
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.placeholder(outside.name)
    CAPTURED.put(node, VALUE.get(outside))
    SITE.put(node, SITE.of(outside))
    set_value(node, VALUE.get(outside))
    return node
