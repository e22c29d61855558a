"""Keeps inductor's CUDA graphs from asking for weights, and from holding cached values.

The store computes values again in the same memory unless somebody may be reading them. A recording
is valid as long as its static inputs stay where they are. Two habits of recordings break that:

- They ask all static inputs for their addresses in each replay, also those that the graph does not
  read. Asking for a weight's address looks like a write. Such inputs are replaced by dummies.
- They hold outputs that are static inputs: what a forward returns for its backward. The store would
  take them for readers. Such outputs are removed from the graph and returned by a wrapper.

Relies on ``torch._inductor.cudagraph_trees``: ``CUDAGraphNode`` compares ``static_input_data_ptrs``
where ``graph_partition`` is off, and holds ``static_output_tensors``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.backend.ahead import is_ahead_of_time
from amp_fx.backend.disk_caches import without_autograd_cache
from amp_fx.torch_private.fake_tensors import unset_fake_temporarily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import fx

    Compiled = Callable[..., Any]


def settled(settings: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Context manager: AOTAutograd reads no graphs that ``apart`` changes from its caches."""
    if is_ahead_of_time() or not _is_on(settings):
        return contextlib.nullcontext()
    return without_autograd_cache()


def _is_on(settings: Mapping[str, Any]) -> bool:
    from amp_fx.torch_private.inductor_config import config

    return bool(settings.get("triton.cudagraphs", config.triton.cudagraphs))


@dataclasses.dataclass(frozen=True)
class Apart:
    """Inputs and outputs that a wrapper around a graph passes and returns in the graph's place.

    Attributes:
        dummies: Replacements of inputs, by position.
        returned: Positions of the inputs that are outputs, by the positions of the outputs.
    """

    dummies: Mapping[int, torch.Tensor]
    returned: Mapping[int, int]

    def wrap(self, compiled: Compiled) -> Compiled:
        """Returns a boxed callable with the inputs and outputs of AOTAutograd's graph."""

        def call(inputs: list[Any]) -> Any:
            given = {k: inputs[i] for k, i in self.returned.items()}
            for i, dummy in self.dummies.items():
                inputs[i] = dummy
            outputs = compiled(inputs)
            return [given.get(k, out) for k, out in enumerate(outputs)] if given else outputs

        return call if self.dummies or self.returned else compiled


def apart(gm: fx.GraphModule, static: Iterable[int]) -> Apart:
    """Removes what a recording would ask or hold from a graph, where CUDA graphs are on."""
    if not _is_on({}):
        return Apart({}, {})
    returned = {} if is_ahead_of_time() else _taken_out(gm, static)
    unused = _unused_inputs(gm)
    with unset_fake_temporarily():
        return Apart({i: torch.empty(1, device=d) for i, d in unused.items()}, returned)


def _taken_out(gm: fx.GraphModule, static: Iterable[int]) -> dict[int, int]:
    """Removes outputs that are static inputs; returns the inputs by position of the output."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    sources = {placeholders[i]: i for i in static}
    output = gm.graph.output_node()
    outputs: Any = output.args[0]
    found = {k: sources[node] for k, node in enumerate(outputs) if node in sources}
    if found:
        output.args = (type(outputs)(None if k in found else o for k, o in enumerate(outputs)),)
        gm.recompile()
    return found


def _unused_inputs(gm: fx.GraphModule) -> dict[int, torch.device]:
    """Returns the devices of inputs that nothing in a graph reads, those on the CPU aside."""
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
