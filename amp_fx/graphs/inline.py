"""Puts the dispatcher-level ops of a decomposed node in the node's place."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from amp_fx.graphs.casts import cast_name, is_cast_call, mark_cast
from amp_fx.graphs.decompose import NotPlainError
from amp_fx.graphs.metadata import CAPTURED, CAST, DECISIONS, provenance
from amp_fx.graphs.values import captured_value, set_value, tensors_in, value_of
from amp_fx.policies.calls import qualified_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.graphs.decompose import Decomposed, OpDecision


def inline(
    node: fx.Node,
    decomposed: Decomposed,
    inputs: list[fx.Node],
    evaluate_node: Callable[[fx.Node], None],
) -> int:
    """Replaces a node by the graph that it was decomposed into.

    Returns:
        The number of casts among the new nodes.

    Raises:
        NotPlainError: A user takes the node's tuple of results whole.
    """
    assert decomposed.graph is not None
    placeholders = decomposed.graph.find_nodes(op="placeholder")
    env: dict[fx.Node, fx.Node] = dict(zip(placeholders, inputs, strict=True))
    num_casts = 0
    for op in decomposed.graph.nodes:
        if op.op not in ("placeholder", "output"):
            env[op] = _copy(op, env, node)
            DECISIONS.put(env[op], _decisions_of(op, decomposed))
            num_casts += CAST.is_on(env[op])
            evaluate_node(env[op])
    result = map_arg(decomposed.graph.output_node().args[0], env.__getitem__)
    _replace(node, result, decomposed, fresh=set(env.values()) - set(inputs))
    return num_casts


def _copy(op: fx.Node, env: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    with node.graph.inserting_before(node):
        new = node.graph.node_copy(op, env.__getitem__)
    new.meta = provenance(node)
    if is_cast_call(new):
        mark_cast(new, str(node.target))
        new._rename(cast_name(new.all_input_nodes[0], CAST.of(new).dtype))
    return new


def _decisions_of(op: fx.Node, decomposed: Decomposed) -> tuple[OpDecision, ...]:
    """The decisions on one op of a decomposed node."""
    return tuple(decision for decision in decomposed.decisions if decision.op == _op_name(op))


def _decisions_on_none(decomposed: Decomposed) -> tuple[OpDecision, ...]:
    """Returns the decisions on ops that were decomposed in their turn, and left the graph."""
    assert decomposed.graph is not None
    names = {_op_name(op) for op in decomposed.graph.nodes}
    return tuple(decision for decision in decomposed.decisions if decision.op not in names)


def _op_name(op: fx.Node) -> str | None:
    return qualified_name(op.target) if isinstance(op.target, torch._ops.OpOverload) else None


def _replace(node: fx.Node, result: Any, decomposed: Decomposed, fresh: set[fx.Node]) -> None:
    """Makes a node's users use ``result``: a node, or a tuple of them."""
    name = node.name
    if isinstance(result, fx.Node):
        if result in fresh:
            _inherit(result, captured_value(node), decomposed)
        node.replace_all_uses_with(result)
        node.graph.erase_node(node)
        if result in fresh:
            result.name = name  # free again: ``_rename`` would number it
        return
    captured = captured_value(node)
    for user in list(node.users):
        if not is_getitem(user):
            raise NotPlainError(f"{node} returns a tuple that {user} takes whole")
        item = result[user.args[1]]
        if item in fresh:
            _inherit(item, captured[user.args[1]], decomposed)
        user.replace_all_uses_with(item)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _inherit(result: fx.Node, captured: Any, decomposed: Decomposed) -> None:
    CAPTURED.put(result, captured)
    DECISIONS.put(result, (*DECISIONS.of(result), *_decisions_on_none(decomposed)))


def spell_out_tuples(node: fx.Node) -> None:
    """Replaces an input that is a tuple of tensors by its items, which can be cast."""
    for source in node.all_input_nodes:
        value = value_of(source)
        if isinstance(value, (tuple, list)) and tensors_in(value):
            items = tuple(_item(source, index, node) for index in range(len(value)))
            node.args = _substitute(node.args, source, items)
            node.kwargs = _substitute(node.kwargs, source, items)


def _item(source: fx.Node, index: int, node: fx.Node) -> fx.Node:
    with node.graph.inserting_before(node):
        item = node.graph.call_function(operator.getitem, (source, index))
    captured = captured_value(source)
    item.meta = provenance(node)
    CAPTURED.put(item, None if captured is None else captured[index])
    set_value(item, value_of(source)[index])
    return item


def _substitute(args: Any, source: fx.Node, items: tuple[fx.Node, ...]) -> Any:
    return map_aggregate(args, lambda a: items if a is source else a)


def is_getitem(node: fx.Node) -> bool:
    """Whether a node takes one item of a tuple."""
    return node.target is operator.getitem and isinstance(node.args[1], int)
