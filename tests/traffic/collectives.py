"""Counts the bytes that a process passes to the collectives of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_fx.graphs.casts import op_name
from amp_fx.graphs.sizes import num_bytes
from amp_fx.graphs.values import argument_values, tensors_in

if TYPE_CHECKING:
    from torch import fx


def collective_bytes(graph: fx.Graph) -> int:
    """Returns the number of bytes that one process passes to the collectives of a graph."""
    # ``wait_tensor`` waits for the result of another collective and moves nothing.
    nodes = [n for n in graph.nodes if op_name(n).startswith("_c10d_functional::")]
    sending = [n for n in nodes if op_name(n) != "_c10d_functional::wait_tensor"]
    return sum(num_bytes(t) for node in sending for t in tensors_in(argument_values(node)))
