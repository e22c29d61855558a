"""LayOutConvolutions: weights that are cached in the layout that convolutions read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.graphs.conditions import check_graph
from amp_fx.passes.lay_out_convolutions import LayOutConvolutions
from amp_fx.torch_private.inductor import GraphLowering
from tests.weights.aot_graphs import text, traced, weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

BF16 = torch.bfloat16
ARGUMENTS = "None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1"
IMAGES, KERNEL = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)


@pytest.fixture(autouse=True)
def channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets inductor decide for channels-last, as it does on some processors only."""
    monkeypatch.setattr(GraphLowering, "decide_layout_opt", lambda *_, **__: True)


def laid_out(program: Callable[..., Any], kernel: torch.Tensor) -> tuple[fx.GraphModule, int]:
    """Runs the pass over a function of a weight and images."""
    gm = traced(program, kernel, IMAGES)
    candidates, num_returned = weights(kernel, None), len(gm.graph.output_node().all_input_nodes)
    each = LayOutConvolutions(candidates, num_returned, is_inference=True)
    count = each.call(gm).counts["laid_out_weights"]
    gm.recompile()
    assert not each.call(gm).modified
    return gm, count


def convolved(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.conv2d(x.to(BF16), w.to(BF16))


def test_golden() -> None:
    gm, count = laid_out(convolved, KERNEL)
    assert count == 1
    assert text(gm.graph) == [
        "w = placeholder",
        "x = placeholder",
        "_to_copy = aten._to_copy(x)",
        "_to_copy_1 = aten._to_copy(w)",
        "clone_default = aten.clone(_to_copy_1)",
        f"convolution = aten.convolution(_to_copy, clone_default, {ARGUMENTS})",
        "return convolution",
    ]
    value = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)[0]
    assert value.meta["val"].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(gm(KERNEL, IMAGES)[0], convolved(KERNEL, IMAGES))


def gradient(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    low = w.to(BF16)
    y = torch.conv2d(x.to(BF16), low)
    convolution = torch.ops.aten.convolution_backward.default
    args = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False])
    return convolution(y, x.to(BF16), low, None, *args)[0]  # type: ignore[no-any-return]


def test_a_backward_reads_the_same_copy() -> None:
    gm, count = laid_out(gradient, KERNEL)
    assert count == 1
    [copy] = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert sorted(user.name for user in copy.users) == ["convolution", "convolution_backward"]


def both(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low = w.to(BF16)
    return torch.conv2d(x.to(BF16), low), low.float() + x.sum()


def returned(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    doubled = w * 2
    return torch.conv2d(x, doubled), doubled


LEFT: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "read as it is": (lambda w, x: torch.conv2d(x, w), KERNEL),
    "read by another op": (both, KERNEL),
    "an image": (lambda w, x: torch.conv2d(w.to(BF16), x[:, :, :2, :2].to(BF16)), KERNEL),
    "returned": (returned, KERNEL),
    "channels-last": (convolved, KERNEL.to(memory_format=torch.channels_last)),
    "both layouts": (convolved, torch.randn(4, 3, 1, 1)),
    "not contiguous": (convolved, torch.randn(3, 4, 3, 3).transpose(0, 1)),
}


@pytest.mark.parametrize(("program", "kernel"), LEFT.values(), ids=LEFT)
def test_left_alone(program: Callable[..., Any], kernel: torch.Tensor) -> None:
    before = text(traced(program, kernel, IMAGES).graph)
    gm, count = laid_out(program, kernel)
    assert (count, text(gm.graph)) == (0, before)


@pytest.mark.parametrize("result", ["output", "gradient"])
def test_a_view_of_the_result_passes_the_check(result: str) -> None:
    def program(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        low, images = w.to(BF16), x.to(BF16)
        output = torch.conv2d(images, low)
        if result == "output":
            return output.view(2, -1)
        arguments = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False])
        grads = torch.ops.aten.convolution_backward(output, images, low, None, *arguments)
        view: torch.Tensor = grads[0].view(2, -1)
        return view

    gm, count = laid_out(program, KERNEL)
    assert count == 1
    check_graph(gm, "lay_out_convolutions")


def test_left_alone_where_inductor_does_not_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphLowering, "decide_layout_opt", lambda *_, **__: False)
    assert laid_out(convolved, KERNEL)[1] == 0
