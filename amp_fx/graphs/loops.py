"""Loops: higher-order ops whose bodies must return a state in the dtypes in which they get it.

Outside of any region, Dynamo captures a loop in float32. Under autocast, the body may return a
state in low precision: eager autocast then rejects the loop. Casts at the end of the body restore
the dtype of the state. The same holds for the branches of a ``cond`` inside the body, which must
return the same dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from amp_fx.graphs.bodies import bodies_of, graph_modules_in, graphs_in
from amp_fx.graphs.metadata import CAPTURED, VALUE, provenance
from amp_fx.graphs.values import captured_dtype, dtypes_differ, remember_captured

if TYPE_CHECKING:
    from collections.abc import Iterator

_hop = torch.ops.higher_order


class _Loop(NamedTuple):
    """Positions of the arguments of a loop.

    Attributes:
        body: Position of the body.
        states: Position of the tuple of states, which the body returns first.
        operands: Positions of the tuples that the body gets, in order.
    """

    body: int
    states: int
    operands: tuple[int, ...]


_LOOPS: dict[Any, _Loop] = {
    _hop.while_loop: _Loop(1, 2, (2, 3)),
    _hop.scan: _Loop(0, 1, (1, 2, 3)),
    _hop.associative_scan: _Loop(0, 1, (1, 1, 2)),
}


def is_loop(node: fx.Node) -> bool:
    """Returns True if a node is a higher-order op that carries a state."""
    return node.target in _LOOPS


def body_of(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """Returns the body of a loop of ``gm``."""
    body_node: Any = node.args[_LOOPS[node.target].body]
    body: fx.GraphModule = gm.get_submodule(str(body_node.target))  # type: ignore[assignment]
    return body


def states_of(node: fx.Node) -> tuple[Any, ...]:
    """Returns the states before the first iteration."""
    states: Any = node.args[_LOOPS[node.target].states]
    return tuple(states)


def body_results(body: fx.GraphModule, node: fx.Node) -> list[Any]:
    """Computes the states after an iteration, on the fake tensors of its capture.

    The inputs have the dtypes of the operands of the loop.
    """
    tuples: list[Any] = [node.args[position] for position in _LOOPS[node.target].operands]
    given = [operand for operands in tuples for operand in operands]
    placeholders = body.graph.find_nodes(op="placeholder")
    # The shapes of one iteration are those of the capture: ``scan`` passes rows of its operands.
    inputs = [_in_dtype(*pair) for pair in zip(placeholders, given, strict=True)]
    return list(body(*inputs)[: len(states_of(node))])


def _in_dtype(placeholder: fx.Node, operand: Any) -> Any:
    captured = CAPTURED.get(placeholder)
    if not isinstance(captured, torch.Tensor) or not isinstance(operand, fx.Node):
        return operand if captured is None else captured
    return captured.to(VALUE.of(operand).dtype)


def differing_states(node: fx.Node, results: list[Any]) -> Iterator[tuple[int, fx.Node]]:
    """Yields the states that an iteration returns in another dtype, with their positions."""
    for index, state in enumerate(states_of(node)):
        if isinstance(state, fx.Node) and dtypes_differ(VALUE.get(state), results[index]):
            yield index, state


def cast_result(body: fx.GraphModule, index: int, dtype: torch.dtype) -> None:
    """Casts one result of a body to a dtype."""
    output = body.graph.output_node()
    results: Any = output.args[0]
    cast = _cast_before(output, results[index], dtype)
    output.args = ((*results[:index], cast, *results[index + 1 :]),)
    body.recompile()


def restore_bodies(gm: fx.GraphModule) -> None:
    """Restores captured dtypes where bodies inside a captured graph must agree, in place.

    These are the states of loops, and the results of the branches of ``cond``.
    """
    for graph in graphs_in(gm):
        remember_captured(graph)
    for module in graph_modules_in(gm):
        for node in module.graph.nodes:
            if is_loop(node):
                for index, state in enumerate(states_of(node)):
                    dtype = _captured_float(state)
                    if dtype is not None:
                        cast_result(body_of(module, node), index, dtype)
                        node.replace_input_with(state, _cast_before(node, state, dtype))
            elif node.target is _hop.cond:
                for branch in bodies_of(module, node):
                    for index, result in enumerate(branch.graph.output_node().args[0]):  # type: ignore[arg-type]
                        dtype = _captured_float(result)
                        if dtype is not None:
                            cast_result(branch, index, dtype)
        module.recompile()


def _captured_float(value: Any) -> torch.dtype | None:
    """Returns the captured dtype of a node that is a floating-point tensor; else None."""
    dtype = captured_dtype(value) if isinstance(value, fx.Node) else None
    return dtype if dtype is not None and dtype.is_floating_point else None


def _cast_before(node: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Returns a node that casts ``source``; ``source`` itself if it is such a node."""
    if source.target is torch.ops.aten.to.dtype and source.args[1] == dtype:
        return source
    with node.graph.inserting_before(node):
        # Unlike ``_to_copy``, ``to`` returns its input if that already has the dtype when the loop
        # runs.
        cast = node.graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
    cast.meta = provenance(source)
    CAPTURED.put(cast, CAPTURED.get(source))
    return cast
