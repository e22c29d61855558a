"""Copies the gradients of a backward graph that are tensors which the forward saved.

Before:
    graph(saved, tangents):
        return (%saved, ...)
After:
    graph(saved, tangents):
        %copy = aten.clone(%saved)
        return (%copy, ...)

A caller may write to a gradient, and the saved tensor may be a cached value: see
Note [Cached values are read-only] in ``amp_fx.weights.pack``.

Left unchanged: gradients of outputs that are passed on, and numbers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.fx.node import map_arg

from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.values import tensors_in
from amp_fx.passes.base import PassResult
from amp_fx.weights.aliases import tangents, viewed_by

if TYPE_CHECKING:
    from torch import fx

    from amp_fx.graphs.conditions import Condition


@dataclasses.dataclass(frozen=True)
class CopyReturnedInputs:
    """Adds copies of saved tensors, and of their views, that a backward returns."""

    name: ClassVar[str] = "copy_returned_inputs"
    is_needed: ClassVar[bool] = True
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    ensures: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``copied_gradients``."""
        output = gm.graph.output_node()
        copies = {node: _copied(node, output) for node in output.all_input_nodes}
        output.args = map_arg(output.args, copies.__getitem__)
        num_copied = sum(node is not copy for node, copy in copies.items())
        return PassResult(Counter(copied_gradients=num_copied))


def _copied(node: fx.Node, output: fx.Node) -> fx.Node:
    base = viewed_by(node)
    is_saved = base.op == "placeholder" and base not in tangents(node.graph)
    if not is_saved or not tensors_in(VALUE.get(node)):
        return node
    with node.graph.inserting_before(output):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    VALUE.put(copy, VALUE.of(node).clone())
    return copy
