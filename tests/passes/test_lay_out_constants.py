"""LayOutConstants: constant weights in the layout that inductor's convolutions read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.passes.lay_out_constants import LayOutConstants
from tests.weights.aot_graphs import text, traced

if TYPE_CHECKING:
    from collections.abc import Callable

ARGUMENTS = "None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1"
IMAGES, KERNEL = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
SIGNALS, VOLUMES = torch.randn(2, 3, 5), torch.randn(2, 3, 4, 4, 4)


def convolved(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.conv2d(x, w)


def test_golden() -> None:
    gm = traced(convolved, KERNEL, IMAGES)
    assert LayOutConstants().call(gm).counts == {"laid_out_constants": 1}
    assert text(gm.graph) == [
        "w = placeholder",
        "x = placeholder",
        "clone_default = aten.clone(w)",
        f"convolution = aten.convolution(x, clone_default, {ARGUMENTS})",
        "return convolution",
    ]
    copy = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)[0]
    assert copy.meta["val"].is_contiguous(memory_format=torch.channels_last)
    gm.recompile()
    torch.testing.assert_close(gm(KERNEL, IMAGES)[0], convolved(KERNEL, IMAGES))
    assert not LayOutConstants().call(gm).modified


def test_strided_views_get_the_layout_they_were_traced_for() -> None:
    def strided(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.conv2d(x, w)
        return torch.as_strided(y, (5,), (2,))

    gm = traced(strided, KERNEL, IMAGES)
    LayOutConstants().call(gm)
    [view] = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    assert view.args[0].target is torch.ops.prims.inductor_force_stride_order.default


LEFT: dict[str, tuple[Callable[..., Any], torch.Tensor, torch.Tensor]] = {
    "channels-last": (convolved, KERNEL.to(memory_format=torch.channels_last), IMAGES),
    "both layouts": (convolved, torch.randn(4, 3, 1, 1), IMAGES),
    "one dimension": (lambda w, x: torch.conv1d(x, w), torch.randn(4, 3, 3), SIGNALS),
    "three dimensions": (lambda w, x: torch.conv3d(x, w), torch.randn(4, 3, 2, 2, 2), VOLUMES),
}


@pytest.mark.parametrize(("program", "kernel", "images"), LEFT.values(), ids=LEFT)
def test_left_alone(
    program: Callable[..., Any], kernel: torch.Tensor, images: torch.Tensor
) -> None:
    gm = traced(program, kernel, images)
    before = text(gm.graph)
    assert not LayOutConstants().call(gm).modified
    assert text(gm.graph) == before
