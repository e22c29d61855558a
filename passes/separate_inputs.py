"""Separates inputs that stay at one address from the graphs that CUDA graphs record.

Before:
    graph(weight_cached, unused, x):
        %y = aten.mm(%x, %weight_cached)
        return (%y, %weight_cached)
After:
    graph(weight_cached, unused, x):     # ``unused`` is a dummy
        %y = aten.mm(%x, %weight_cached)
        return (%y, None)                # a wrapper returns the input

The store computes values again in the same memory unless something may still read them, so a
recording stays valid: the addresses of its static inputs do not change. Two properties of
recordings conflict with that:

- Each replay reads the addresses of all static inputs, even of those that the graph does not use.
  Reading the address of a weight counts as a write. Unused inputs are replaced by dummies.
- A recording holds references to outputs in the memory of static inputs, such as values that a
  forward saves for its backward, and views of them. The store counts them as readers. Such outputs
  are removed from the graph and returned by a wrapper.

Relies on ``torch._inductor.cudagraph_trees``: ``CUDAGraphNode`` compares ``static_input_data_ptrs``
where ``graph_partition`` is off, and holds ``static_output_tensors``.

Left unchanged: outputs that are no view of an input, or a view in another dtype or with symbolic
sizes; inputs on the CPU, whose addresses are not read.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from amp_fx.graphs.conditions import VALUES_KNOWN
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.values import is_symbolic
from amp_fx.passes.base import PassResult
from amp_fx.torch_private.fake_tensors import unset_fake_temporarily
from amp_fx.weights.aliases import viewed_by

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from amp_fx.graphs.conditions import Condition

SEPARATED = "amp_fx_separated_inputs"
"""Key of ``SeparatedInputs`` in ``gm.meta``, between the pass and the compilation."""


@dataclasses.dataclass(frozen=True)
class InputView:
    """An output that is an input, or a view of it.

    Attributes:
        position: The position of the input.
        layout: Sizes, strides and the offset from the input's first element, in elements; None for
            the input itself.
    """

    position: int
    layout: tuple[torch.Size, tuple[int, ...], int] | None

    def of(self, inputs: Sequence[Any]) -> Any:
        """Returns the output for a list of inputs."""
        source = inputs[self.position]
        if self.layout is None:
            return source
        sizes, strides, offset = self.layout
        return source.as_strided(sizes, strides, source.storage_offset() + offset)


@dataclasses.dataclass(frozen=True)
class SeparatedInputs:
    """Inputs and outputs that a wrapper handles instead of the recorded graph.

    Attributes:
        dummies: Replacements of unused inputs, by position.
        returned: The outputs that are inputs or views of inputs, by position.
    """

    dummies: Mapping[int, torch.Tensor]
    returned: Mapping[int, InputView]

    def wrap(self, compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Wraps a compiled graph in a boxed callable with the original inputs and outputs."""

        def call(inputs: list[Any]) -> Any:
            # Before the call, which empties its list of inputs.
            returned = {k: view.of(inputs) for k, view in self.returned.items()}
            for i, dummy in self.dummies.items():
                inputs[i] = dummy
            outputs = compiled(inputs)
            return [returned.get(k, out) for k, out in enumerate(outputs)] if returned else outputs

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


@dataclasses.dataclass(frozen=True)
class SeparateInputs:
    """Removes returned static inputs, and lists unused inputs.

    Attributes:
        moving: Names of the inputs whose addresses change between calls. All others are static:
            weights, saved tensors, and the cached values that passes add.
    """

    name: ClassVar[str] = "separate_inputs"
    requires: ClassVar[tuple[Condition, ...]] = (VALUES_KNOWN,)
    moving: Collection[str] = dataclasses.field(repr=False)

    def call(self, gm: fx.GraphModule) -> PassResult:
        """Counts ``separated_outputs``."""
        returned = self._remove_returned(gm)
        unused = _unused_inputs(gm)
        if unused or returned:
            with unset_fake_temporarily():
                dummies = {i: torch.empty(1, device=device) for i, device in unused.items()}
            gm.meta[SEPARATED] = SeparatedInputs(dummies, returned)
        return PassResult(Counter(separated_outputs=len(returned)))

    def _remove_returned(self, gm: fx.GraphModule) -> dict[int, InputView]:
        """Removes outputs in the memory of static inputs; returns them by their positions."""
        placeholders = enumerate(gm.graph.find_nodes(op="placeholder"))
        static = {node: i for i, node in placeholders if node.name not in self.moving}
        output = gm.graph.output_node()
        outputs: Any = output.args[0]
        views = {k: _input_view(o, static) for k, o in enumerate(outputs) if isinstance(o, fx.Node)}
        returned = {k: view for k, view in views.items() if view is not None}
        if returned:
            kept = type(outputs)(None if k in returned else o for k, o in enumerate(outputs))
            output.args = (kept,)
            gm.graph.eliminate_dead_code()  # else views of an input would count as its users
        return returned


def _input_view(node: fx.Node, static: Mapping[fx.Node, int]) -> InputView | None:
    """Describes an output; None if it has memory of its own or no constant layout."""
    base = viewed_by(node)
    if base not in static:
        return None
    if base is node:
        return InputView(static[base], None)
    source, view = VALUE.of(base), VALUE.of(node)
    is_plain = source.dtype == view.dtype and not (view.is_conj() or view.is_neg())
    if not is_plain or is_symbolic(source) or is_symbolic(view):
        return None
    offset = view.storage_offset() - source.storage_offset()
    return InputView(static[base], (view.size(), view.stride(), offset))


def _unused_inputs(gm: fx.GraphModule) -> dict[int, torch.device]:
    """Returns the devices of inputs without users, by position; CPU inputs are omitted."""
    values = {
        i: VALUE.get(node)
        for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if not node.users
    }
    return {
        i: value.device
        for i, value in values.items()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu"
    }
