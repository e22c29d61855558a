"""What is done with a graph that cannot be rewritten: it runs under native autocast."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from amp_fx.values import captured_value, remember_captured

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.regions import AutocastState

log = logging.getLogger(__name__)


def as_native_region(
    gm: fx.GraphModule, state: AutocastState, *, restores_outputs: bool
) -> fx.GraphModule:
    """Makes one region of a whole graph as Dynamo captured it, in place.

    Args:
        gm: A graph that no pass has touched.
        state: The region; nested ones in the graph hold as they are.
        restores_outputs: Whether outputs are cast to the dtypes that were captured.
    """
    remember_captured(gm.graph)
    graph = gm.graph
    output = graph.output_node()
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        enters = [graph.call_function(_enter_autocast, marker) for marker in state.markers()]
    with graph.inserting_before(output):
        for enter in reversed(enters):
            graph.call_function(_exit_autocast, (enter,))
        if restores_outputs:
            _restore_outputs(graph, output)
    graph.lint()
    gm.recompile()
    return gm


def _restore_outputs(graph: fx.Graph, output: fx.Node) -> None:
    for node in output.all_input_nodes:
        captured = captured_value(node)
        if isinstance(captured, torch.Tensor) and captured.is_floating_point():
            restored = graph.call_function(torch.ops.aten.to.dtype, (node, captured.dtype))
            output.replace_input_with(node, restored)


def warn_fallback(error: Exception) -> None:
    """Says once per cause that a graph was not rewritten, and how to see more."""
    _warn_once(f"a graph runs under native autocast because it could not be rewritten: {error}")


def warn_eager(error: Exception, compiler: str) -> None:
    """Says once per cause that a rewritten graph was not compiled, and how to see more."""
    reason = f"{type(error).__name__}: {_first_line(error)}"
    _warn_once(f"a graph runs op by op, with its casts, because {compiler!r} failed: {reason}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _warn_once(message: str) -> None:
    if message in _seen:
        return
    _seen.add(message)
    log.warning(
        '%s (TORCH_LOGS="+amp_fx" shows more; options={"fallback": False} raises instead)',
        message,
    )


_seen: set[str] = set()
