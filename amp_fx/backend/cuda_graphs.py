"""Prevents inductor's CUDA graphs from touching weights and from holding cached values.

The store recomputes values in the same memory unless something may still read them, so a recording
stays valid: the addresses of its static inputs do not change. Two properties of recordings conflict
with that:

- Each replay reads the addresses of all static inputs, even of those that the graph does not use.
  Reading the address of a weight counts as a write. Unused inputs are replaced by dummies.
- A recording holds references to outputs in the memory of static inputs, such as values that a
  forward saves for its backward, and views of them. The store counts them as readers. Such outputs
  are removed from the graph and returned by a wrapper.

Relies on ``torch._inductor.cudagraph_trees``: ``CUDAGraphNode`` compares ``static_input_data_ptrs``
where ``graph_partition`` is off, and holds ``static_output_tensors``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amp_fx.backend.ahead import is_ahead_of_time
from amp_fx.graphs.metadata import VALUE
from amp_fx.graphs.values import is_symbolic
from amp_fx.torch_private.fake_tensors import unset_fake_temporarily
from amp_fx.weights.aliases import viewed_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Compiled = Callable[..., Any]


def has_cudagraphs(settings: Mapping[str, Any]) -> bool:
    """Returns True if ``separate_inputs`` changes graphs that are compiled with some settings."""
    return not is_ahead_of_time() and _is_on(settings)


def _is_on(settings: Mapping[str, Any]) -> bool:
    from amp_fx.torch_private.inductor_config import config

    return bool(settings.get("triton.cudagraphs", config.triton.cudagraphs))


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
class CudagraphInputs:
    """Inputs and outputs that a wrapper handles instead of the recorded graph.

    Attributes:
        dummies: Replacements of unused inputs, by position.
        returned: The outputs that are inputs or views of inputs, by position.
    """

    dummies: Mapping[int, torch.Tensor]
    returned: Mapping[int, InputView]

    def wrap(self, compiled: Compiled) -> Compiled:
        """Wraps a compiled graph in a boxed callable with the original inputs and outputs."""

        def call(inputs: list[Any]) -> Any:
            returned = {k: view.of(inputs) for k, view in self.returned.items()}
            for i, dummy in self.dummies.items():
                inputs[i] = dummy
            outputs = compiled(inputs)
            return [returned.get(k, out) for k, out in enumerate(outputs)] if returned else outputs

        return call if self.dummies or self.returned else compiled


def separate_inputs(gm: fx.GraphModule, static: Iterable[int]) -> CudagraphInputs:
    """Removes returned static inputs from a graph and finds unused ones, if CUDA graphs are on."""
    if not _is_on({}):
        return CudagraphInputs({}, {})
    # A graph that is saved cannot have a wrapper, so its outputs stay.
    returned = {} if is_ahead_of_time() else _remove_returned(gm, static)
    unused = _unused_inputs(gm)
    with unset_fake_temporarily():
        dummies = {i: torch.empty(1, device=device) for i, device in unused.items()}
    return CudagraphInputs(dummies, returned)


def _remove_returned(gm: fx.GraphModule, static: Iterable[int]) -> dict[int, InputView]:
    """Removes outputs in the memory of static inputs; returns them by their positions."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    sources = {placeholders[i]: i for i in static}
    output = gm.graph.output_node()
    outputs: Any = output.args[0]
    found = {k: _input_view(o, sources) for k, o in enumerate(outputs) if isinstance(o, fx.Node)}
    returned = {k: view for k, view in found.items() if view is not None}
    if returned:
        output.args = (type(outputs)(None if k in returned else o for k, o in enumerate(outputs)),)
        gm.graph.eliminate_dead_code()  # else views of an input would count as its users
        gm.recompile()
    return returned


def _input_view(node: fx.Node, sources: Mapping[fx.Node, int]) -> InputView | None:
    """Describes an output; None if it has memory of its own or no constant layout."""
    base = viewed_by(node)
    if base not in sources:
        return None
    if base is node:
        return InputView(sources[base], None)
    source, view = VALUE.of(base), VALUE.of(node)
    is_plain = source.dtype == view.dtype and not (view.is_conj() or view.is_neg())
    if not is_plain or is_symbolic(source) or is_symbolic(view):
        return None
    offset = view.storage_offset() - source.storage_offset()
    return InputView(sources[base], (view.size(), view.stride(), offset))


def _unused_inputs(gm: fx.GraphModule) -> dict[int, torch.device]:
    """Returns the devices of inputs without users, by position; CPU inputs are omitted."""
    values = {
        i: node.meta.get("val")
        for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if not node.users
    }
    return {
        i: value.device
        for i, value in values.items()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu"
    }
