"""RecordOutputStrides: compiled code returns the strides of the graph before its layouts change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amp_fx.passes.record_output_strides import RecordOutputStrides
from amp_fx.torch_private.patches import repaired_inductor
from tests.weights.aot_graphs import text, traced

if TYPE_CHECKING:
    from torch import fx

IMAGES, KERNEL = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.conv2d(x, w)
    return y, y.transpose(1, 3), y.sum()


def recorded(gm: fx.GraphModule) -> list[tuple[int, ...]]:
    """Returns the recorded strides as numbers."""
    strides = gm.graph.output_node().meta["original_output_strides"]
    return [tuple(map(int, each)) for each in strides]


def test_golden() -> None:
    gm = traced(program, IMAGES, KERNEL)
    before = text(gm.graph)
    assert not RecordOutputStrides().call(gm).modified
    assert text(gm.graph) == before
    assert recorded(gm) == [out.stride() for out in program(IMAGES, KERNEL)]


def test_layouts_that_change_later_do_not_count() -> None:
    """Inductor records strides as well, after it computed all values again."""
    gm = traced(program, IMAGES, KERNEL)
    with repaired_inductor():
        RecordOutputStrides().call(gm)
        y = next(node for node in gm.graph.nodes if "conv" in node.name)
        y.meta["val"] = y.meta["val"].to(memory_format=torch.channels_last)
        RecordOutputStrides().call(gm)
    assert recorded(gm) == [out.stride() for out in program(IMAGES, KERNEL)]
