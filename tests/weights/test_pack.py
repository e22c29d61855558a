"""packing_passes: each step of their order has a graph that comes out otherwise without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.backend.lower import AotGraph, pack_graph
from amp_fx.backend.pipeline import packing_passes, run_passes
from amp_fx.options import Options
from amp_fx.passes import widen_products
from amp_fx.torch_private.fake_tensors import detect_fake_mode
from amp_fx.weights.cpu.few_rows import MAX_ROWS
from amp_fx.weights.pack import CannotPackError, Constants, packing
from tests import needs
from tests.weights.aot_graphs import computed, text, traced, weights

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import fx

pytestmark = needs.FROZEN_GRAPHS

BF16 = torch.bfloat16


def integers(*sizes: int) -> torch.Tensor:
    """Numbers whose products and sums are exact in bfloat16, so that no order changes them."""
    return torch.randint(-1, 2, sizes, generator=torch.Generator().manual_seed(0)).float()


def linear(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.to(BF16) @ w.to(BF16).t()


def packed(
    program: Callable[..., Any], *tensors: torch.Tensor, skipped: Collection[str] = ()
) -> tuple[fx.GraphModule, Constants]:
    """Packs the first tensor as a weight of a function of all tensors, without some passes.

    ``"last fold_constants"`` skips the last pass of that name, and others the first.
    """
    gm = traced(program, *tensors)
    constants = Constants({0: "a"})
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    passes = packing_passes(
        constants,
        {0: tensors[0]},
        Options(),
        is_strict=False,
        is_channels_last="conv" in str(gm.graph),
    )
    run = list(passes)
    for name in skipped:
        places = [i for i, each in enumerate(run) if each.name == name.removeprefix("last ")]
        del run[places[-1 if name.startswith("last ") else 0]]
    with packing(detect_fake_mode(fakes)):
        run_passes(gm, run)
    return gm, constants


def ops(constants: Constants, gm: fx.GraphModule) -> set[str]:
    """Returns the ops that compute the constants and the new inputs of a packed graph."""
    plan = constants.plan(gm, (), {})
    return {op for spec in plan.computed for op in spec.ops}


MANY, FEW = integers(2 * MAX_ROWS, 96), integers(1, 96)
WEIGHT = integers(96, 96)


def test_golden_few_rows() -> None:
    """The weight is rounded and blocked once, and is an input of the graph."""
    gm, constants = packed(linear, WEIGHT, FEW)
    assert [line.split(" = ")[1].split("(")[0] for line in text(gm.graph)[:-1]] == [
        "placeholder",
        "placeholder",
        "prims.convert_element_type" if "prims" in str(gm.graph) else "aten._to_copy",
        "amp_fx.few_rows_product",
    ]
    assert {"_to_copy", "clone"} <= ops(constants, gm)
    gm.recompile()
    values = computed(constants.specs, [WEIGHT])
    assert torch.equal(gm(FEW, *values)[0], linear(WEIGHT, FEW))


def without(name: str, program: Callable[..., Any], *tensors: torch.Tensor) -> tuple[Any, Any]:
    """Returns the ops of constants, and the graph's text, with and without one pass."""
    results = []
    for skipped in ((), (name,)):
        gm, constants = packed(program, *tensors, skipped=skipped)
        results.append((ops(constants, gm), "\n".join(text(gm.graph))))
    return results[0], results[1]


def twice(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x.to(BF16) @ w.to(BF16).t()) + (x.to(BF16) @ w.to(BF16).t())


def convolved(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.conv2d(x.to(BF16), w.to(BF16), padding=1)


def normed(w: torch.Tensor, x: torch.Tensor) -> Any:
    scale = w.sum((1, 2, 3)).reshape(-1, 1, 1)
    convert = torch.ops.prims.convert_element_type.default
    low = torch.ops.aten.convolution.default(
        convert(x, BF16), convert(w, BF16), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )
    return convert(torch.ops.aten.mul.Tensor(convert(low, torch.float32), scale), BF16)


IMAGES, KERNEL = integers(2, 8, 9, 9), integers(8, 8, 3, 3)
STEPS: dict[str, tuple[Callable[..., Any], torch.Tensor, torch.Tensor, str, str]] = {
    "merge_duplicates": (twice, WEIGHT, FEW, "", "few_rows_product_default_1 ="),
    "fold_constants": (linear, WEIGHT, FEW, "= amp_fx.few_rows_product", ""),
    "block_few_rows": (linear, WEIGHT, FEW, "= amp_fx.few_rows_product", "_reorder_linear_weight"),
    "pack_for_kernels": (linear, WEIGHT, MANY, "_reorder_linear_weight", "= aten.mm"),
    "fold_batch_norms": (normed, KERNEL, IMAGES, "constant: mul", "= aten.mul"),
    "lay_out_constants": (convolved, KERNEL, IMAGES, "constant: clone", ""),
    "constants_to_inputs": (linear, WEIGHT, FEW, "", "= get_attr"),
}
"""By pass: a program, its weight and input, and a text that there is with it, or without it."""


@pytest.mark.parametrize("name", STEPS)
def test_each_step_is_needed(name: str) -> None:
    """Compares the graph and the ops of its constants with and without one pass."""
    program, weight, x, only_with, only_without = STEPS[name]
    texts = []
    for skipped in ((), (name,)):
        gm, constants = packed(program, weight, x, skipped=skipped)
        computed_once = sorted(ops(constants, gm)) if name != "constants_to_inputs" else []
        texts.append("\n".join([*text(gm.graph), *(f"constant: {op}" for op in computed_once)]))
    with_pass, without_pass = texts
    for only, this, other in (
        (only_with, with_pass, without_pass),
        (only_without, without_pass, with_pass),
    ):
        assert only in this
        assert only not in other or not only


def test_products_are_widened_before_inductor_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneDNN would multiply in the low dtype, for which the processor has no instructions here."""
    monkeypatch.setattr(widen_products, "is_wide", lambda *_: True)
    monkeypatch.setattr("amp_fx.weights.cpu.few_rows.takes_template", lambda *_: None)
    (ops_wide, wide), (ops_low, low) = without("widen_products", linear, WEIGHT, MANY)
    assert "amp_fx.rounded" in wide
    assert "amp_fx.rounded" not in low
    assert {"_to_copy", "convert_element_type"} <= ops_wide
    assert "convert_element_type" not in ops_low


def test_weights_are_laid_out_before_they_are_packed() -> None:
    images, kernel = integers(2, 8, 9, 9), integers(8, 8, 3, 3)
    (ops_laid, _), (ops_plain, _) = without("lay_out_constants", convolved, kernel, images)
    assert "clone" in ops_laid
    assert "clone" not in ops_plain


def shifted(w: torch.Tensor, x: torch.Tensor) -> Any:
    """A convolution with a float32 bias that is computed from its weight, plus the images."""
    convert = torch.ops.prims.convert_element_type.default
    low = torch.ops.aten.convolution.default(
        convert(x, BF16), convert(w, BF16), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )
    shift = w.sum((1, 2, 3)).reshape(-1, 1, 1)
    total = torch.ops.aten.add.Tensor(convert(low, torch.float32), shift)
    return torch.ops.aten.add.Tensor(convert(total, BF16), convert(x, BF16))


def biases(gm: fx.GraphModule) -> list[torch.dtype]:
    """Returns the dtypes of the biases of packed convolutions."""
    op = torch.ops.mkldnn._convolution_pointwise.default
    nodes = gm.graph.find_nodes(op="call_function", target=op)
    return [node.args[2].meta["val"].dtype for node in nodes]


def test_biases_are_rounded_after_convolutions_are_packed() -> None:
    """Whether a tensor is added to the result is known then: its kernel takes no float32 bias."""
    images, kernel = integers(2, 8, 9, 9), integers(8, 8, 3, 3)
    rounded, _ = packed(shifted, kernel, images)
    unrounded, _ = packed(shifted, kernel, images, skipped=["round_biases"])
    assert (biases(rounded), biases(unrounded)) == ([BF16], [torch.float32])


def test_packed_weights_and_rounded_biases_are_computed_once() -> None:
    images, kernel = integers(2, 8, 9, 9), integers(8, 8, 3, 3)
    folded, constants = packed(shifted, kernel, images)
    unfinished = ["last fold_constants", "record_values"]  # which cannot evaluate packing
    unfolded, _ = packed(shifted, kernel, images, skipped=unfinished)
    computed_later = {"_reorder_convolution_weight", "convert_element_type"}
    assert computed_later <= ops(constants, folded)
    lines = ["\n".join(text(gm.graph)) for gm in (folded, unfolded)]
    assert [line.count("= mkldnn._reorder_convolution_weight") for line in lines] == [0, 1]
    assert [line.count("= prims.convert_element_type") for line in lines] == [1, 2]


def test_constants_become_inputs_last() -> None:
    gm, _ = packed(linear, WEIGHT, FEW, skipped=["constants_to_inputs"])
    assert gm.graph.find_nodes(op="get_attr")
    gm, _ = packed(linear, WEIGHT, FEW)
    assert not gm.graph.find_nodes(op="get_attr")


def test_nodes_that_inductor_adds_get_values() -> None:
    gm, _ = packed(convolved, integers(8, 8, 3, 3), integers(2, 8, 9, 9))
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")


def test_float32_convolutions_are_refused_under_strict_numerics() -> None:
    kernel, images = integers(8, 8, 3, 3), integers(2, 8, 9, 9)
    gm = traced(lambda w, x: torch.conv2d(x, w, padding=1), kernel, images)
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    graph = AotGraph(gm, fakes, {"is_inference": True}, is_counted=False)
    options = Options.parse({"numerics": "strict"})
    with packing(detect_fake_mode(fakes)), pytest.raises(CannotPackError, match="another order"):
        pack_graph(graph, options, weights(kernel, None), {0: kernel})


def test_the_plan_has_reasons() -> None:
    bias = integers(96)
    gm = traced(lambda b, w, x: (x + b).to(BF16) @ w.to(BF16).t(), bias, WEIGHT, MANY)
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    graph = AotGraph(gm, fakes, {"is_inference": True}, is_counted=False)
    candidates = weights(bias, WEIGHT, None)
    with packing(detect_fake_mode(fakes)):
        _, planned, _ = pack_graph(graph, Options(), candidates, {0: bias, 1: WEIGHT})
    assert dict(planned.uncached) == {"a": "kernels read it as it is"}
    assert [spec.names for spec in planned.constants] == [("b",)]
    assert planned.passed == (2,)
