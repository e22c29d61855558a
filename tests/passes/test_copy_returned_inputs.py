"""CopyReturnedInputs: gradients never share memory with tensors that the forward saved."""

from __future__ import annotations

import torch

from amp_fx.passes.copy_returned_inputs import CopyReturnedInputs
from tests.weights.aot_graphs import text, traced

SAVED, TANGENTS = torch.arange(6.0).view(2, 3), torch.ones(2, 3)


def backward(saved: torch.Tensor, tangents_1: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return saved, saved.t(), tangents_1.t(), tangents_1 * saved


def test_golden() -> None:
    gm = traced(backward, SAVED, TANGENTS)
    assert CopyReturnedInputs().call(gm).counts == {"copied_gradients": 2}
    assert text(gm.graph) == [
        "saved = placeholder",
        "tangents_1 = placeholder",
        "t = aten.t(saved)",
        "t_1 = aten.t(tangents_1)",
        "mul = aten.mul.Tensor(tangents_1, saved)",
        "clone_default = aten.clone(saved)",
        "clone_default_1 = aten.clone(t)",
        "return clone_default, clone_default_1, t_1, mul",
    ]
    assert not CopyReturnedInputs().call(gm).counts["copied_gradients"]


def test_numbers_strides_and_memory() -> None:
    gm = traced(backward, SAVED, TANGENTS)
    CopyReturnedInputs().call(gm)
    gm.recompile()
    results, expected = gm(SAVED, TANGENTS), backward(SAVED, TANGENTS)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)
        assert result.stride() == wanted.stride()
        result.zero_()
    assert torch.equal(SAVED, torch.arange(6.0).view(2, 3))


def test_gradients_that_are_no_tensors_are_returned() -> None:
    """Saved sizes are numbers, and some inputs have no gradient."""
    gm = traced(lambda saved, tangents_1: (saved * 2, tangents_1), SAVED, TANGENTS)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        size = gm.graph.placeholder("size")
    size.meta["val"] = 3
    output.args = ((None, size, *output.args[0]),)  # type: ignore[misc]
    before = text(gm.graph)
    assert not CopyReturnedInputs().call(gm).modified
    assert text(gm.graph) == before
