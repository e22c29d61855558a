"""In the place of inductor's CUDA graphs: the code is run anew, over the memory of a recording.

A recording asks and holds what one of ``cudagraph_trees`` does. It compares the addresses of static
inputs in each replay, and copies other inputs. Results lie where they lay before. It holds results
that are static inputs, and asks static inputs for their storages when it is made.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from tests.cuda.memory import library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest


@dataclasses.dataclass(eq=False)
class Graph:
    """One graph of inductor's, which is recorded in its first call.

    Attributes:
        model: The generated code.
        static: The inputs whose addresses stay.
        num_recordings: How often it was recorded: first, and when a static input lay elsewhere.
        num_copied: How many inputs each replay copies.
    """

    model: Callable[[list[Any]], Any]
    static: Sequence[int]
    num_recordings: int = 0
    num_copied: int = 0
    addresses: dict[int, int] = dataclasses.field(default_factory=dict)
    inputs: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    outputs: list[Any] = dataclasses.field(default_factory=list)

    def __call__(self, given: list[Any]) -> list[Any]:
        """Replays the graph, or records it."""
        tensors = {i: x for i, x in enumerate(given) if isinstance(x, torch.Tensor)}
        addresses = {i: x.data_ptr() for i, x in tensors.items() if i in self.static}
        is_recorded = self.addresses == addresses and self.num_recordings > 0
        if not is_recorded:
            self.addresses = addresses
            self.inputs = {i: x.detach().clone() for i, x in tensors.items() if i not in addresses}
            self.num_copied = len(self.inputs)
            for i in addresses:
                tensors[i].untyped_storage().data_ptr()  # Python's object of it stays
        for i, mine in self.inputs.items():
            given[i] = mine.copy_(given[i])
        found = self.model(given)
        if is_recorded:
            self._give(found)
        else:
            self.num_recordings += 1
            self.outputs = list(found)
        return [x.detach() if isinstance(x, torch.Tensor) else x for x in self.outputs]

    def _give(self, found: Sequence[Any]) -> None:
        for mine, new in zip(self.outputs, found, strict=True):
            if isinstance(new, torch.Tensor) and not library().is_same_memory(mine, new):
                mine.copy_(new)


def record_graphs(patch: pytest.MonkeyPatch) -> list[Graph]:
    """Records the graphs that inductor compiles for CUDA graphs, in a list that grows with them.

    Relies on ``torch._inductor.compile_fx.cudagraphify``.

    Args:
        patch: Undoes the change.
    """
    from torch._inductor import compile_fx

    graphs: list[Graph] = []

    def cudagraphify(model: Any, static_input_idxs: Sequence[int] = (), **_: Any) -> Graph:
        graphs.append(Graph(model, static_input_idxs))
        return graphs[-1]

    patch.setattr(compile_fx, "cudagraphify", cudagraphify)
    return graphs
