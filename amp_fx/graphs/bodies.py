"""Graphs inside higher-order ops: where they and their operands stand among the arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.graphs.metadata import HAS_REWRITTEN_BODIES

if TYPE_CHECKING:
    from collections.abc import Collection

_hop = torch.ops.higher_order

_BODIES: dict[Any, tuple[slice, int | None]] = {
    _hop.tag_activation_checkpoint: (slice(1), None),
    _hop.wrap: (slice(1), None),
    _hop.cond: (slice(1, 3), 3),
}
"""Higher-order ops whose bodies are plain graphs, called on operands: where the bodies
stand, and which argument is the tuple of operands; None where all others are."""


def has_plain_bodies(node: fx.Node) -> bool:
    """Whether a node is a higher-order op whose bodies may be rewritten."""
    return node.target in _BODIES


def is_reentrant_checkpoint(node: fx.Node) -> bool:
    """Whether a node is ``torch.utils.checkpoint`` that recomputes under autograd's feet.

    Relies on Dynamo handing the checkpoint's arguments on; None means True there.
    """
    is_checkpoint = node.target is _hop.tag_activation_checkpoint
    return is_checkpoint and node.kwargs.get("use_reentrant", False) is not False


def body_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The ``get_attr`` nodes of the bodies of a higher-order op."""
    return node.args[_BODIES[node.target][0]]  # type: ignore[return-value]


def bodies_of(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The bodies of one higher-order op of ``gm``."""
    return [getattr(gm, str(body_node.target)) for body_node in body_nodes(node)]


def operands_of(node: fx.Node) -> tuple[Any, ...]:
    """Returns the operands with which a higher-order op calls its bodies."""
    bodies, position = _BODIES[node.target]
    operands: Any = node.args[bodies.stop :] if position is None else node.args[position]
    return tuple(operands)


def append_operand(node: fx.Node, operand: fx.Node) -> None:
    """Calls the bodies with one more operand; each needs a placeholder for it."""
    _, position = _BODIES[node.target]
    if position is None:
        node.args = (*node.args, operand)
    else:
        node.update_arg(position, (*operands_of(node), operand))


def drop_unused_operands(gm: fx.GraphModule, names: Collection[str]) -> None:
    """Takes out operands that no body reads, those of nested higher-order ops first.

    Args:
        gm: The graph; of it, only higher-order ops whose operands are one argument are looked at.
        names: Of the placeholders that may be taken out of the operands.
    """
    for node in gm.graph.nodes:
        position = _BODIES[node.target][1] if has_plain_bodies(node) else None
        if position is None:
            continue
        bodies = bodies_of(gm, node)
        inputs = [body.graph.find_nodes(op="placeholder") for body in bodies]
        for body, placeholders in zip(bodies, inputs, strict=True):
            passed = {
                p.name
                for p, o in zip(placeholders, operands_of(node), strict=True)
                if getattr(o, "name", None) in names
            }
            drop_unused_operands(body, passed)
        kept = []
        for index, operand in enumerate(operands_of(node)):
            placeholders = [nodes[index] for nodes in inputs]
            is_named = isinstance(operand, fx.Node) and operand.name in names
            if not is_named or any(placeholder.users for placeholder in placeholders):
                kept.append(operand)
                continue
            for body, placeholder in zip(bodies, placeholders, strict=True):
                body.graph.erase_node(placeholder)
        node.update_arg(position, tuple(kept))


def mark_rewritten(node: fx.Node) -> None:
    """Records that the bodies of a higher-order op hold casts of their own."""
    HAS_REWRITTEN_BODIES.put(node, True)


def is_rewritten(node: fx.Node) -> bool:
    """Whether ``mark_rewritten`` was called for a node."""
    return HAS_REWRITTEN_BODIES.is_on(node)


def rewritten_bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """The rewritten graphs inside the higher-order ops of ``gm``."""
    return [body for node in gm.graph.nodes if is_rewritten(node) for body in bodies_of(gm, node)]
