"""Keeps inductor's CUDA graphs from asking for weights, and from holding kept copies.

The store makes values again in the same memory unless somebody may be reading them. A recording is
valid as long as its static inputs stay where they are. Two habits of recordings would break that:

- They ask all static inputs for their addresses in each replay, also those that the graph does not
  read. Asking for a weight's address looks like a write. Such inputs are replaced by dummies.
- They hold outputs that are static inputs: what a forward returns for its backward. The store would
  take them for readers. Such outputs are taken out of the graph and given back around it.

Relies on ``torch._inductor.cudagraph_trees``: ``CUDAGraphNode`` compares ``static_input_data_ptrs``
where ``graph_partition`` is off, and holds ``static_output_tensors``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import unset_fake_temporarily

from amp_fx.backend.ahead import is_ahead_of_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Compiled = Callable[..., Any]


def settled(settings: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Compiles graphs anew where ``apart`` changes them; AOTAutograd's cache lacks the change."""
    if is_ahead_of_time() or not _is_on(settings):
        return contextlib.nullcontext()
    patch: contextlib.AbstractContextManager[None] = functorch_config.patch(
        enable_autograd_cache=False, enable_remote_autograd_cache=False
    )
    return patch


def _is_on(settings: Mapping[str, Any]) -> bool:
    from torch._inductor import config

    return bool(settings.get("triton.cudagraphs", config.triton.cudagraphs))


@dataclasses.dataclass(frozen=True)
class Apart:
    """What a graph of AOTAutograd leaves to those who call it.

    Attributes:
        dummies: By position, what is passed in the place of inputs.
        returned: By the position of an output, that of the input which it is.
    """

    dummies: Mapping[int, torch.Tensor]
    returned: Mapping[int, int]

    def wrap(self, compiled: Compiled) -> Compiled:
        """The compiled graph, as a boxed callable with the inputs and outputs of AOTAutograd's."""

        def call(inputs: list[Any]) -> Any:
            given = {k: inputs[i] for k, i in self.returned.items()}
            for i, dummy in self.dummies.items():
                inputs[i] = dummy
            outputs = compiled(inputs)
            return [given.get(k, out) for k, out in enumerate(outputs)] if given else outputs

        return call if self.dummies or self.returned else compiled


def apart(gm: fx.GraphModule, static: Iterable[int]) -> Apart:
    """Takes out of a graph what a recording of it would ask or hold, where CUDA graphs are on."""
    if not _is_on({}):
        return Apart({}, {})
    returned = {} if is_ahead_of_time() else _taken_out(gm, static)
    unused = _unused_inputs(gm)
    with unset_fake_temporarily():
        return Apart({i: torch.empty(1, device=d) for i, d in unused.items()}, returned)


def _taken_out(gm: fx.GraphModule, static: Iterable[int]) -> dict[int, int]:
    """Removes outputs that are static inputs; the inputs by the positions of the outputs."""
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
    """The inputs of a graph that nothing reads, with their devices; not those on the CPU."""
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
