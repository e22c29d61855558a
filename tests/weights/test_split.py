"""split: what is computed once per update of the weights, and what stays in the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_fx.weights.plan import plan
from amp_fx.weights.split import split
from tests.weights.aot_graphs import computed, text, traced, weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from amp_fx.weights.plan import CachePlan

X, W, V = (torch.randn(4, 4) for _ in range(3))
BF16 = torch.bfloat16


def planned(
    program: Callable[..., Any], *, num_weights: int = 1
) -> tuple[fx.GraphModule, CachePlan]:
    """Plans a function of weights, followed by X."""
    tensors = (W, V)[:num_weights]
    gm = traced(program, *tensors, X)
    return gm, plan(gm, weights(*tensors, None), len(list(gm.graph.output_node().all_input_nodes)))


def test_golden_a_cast_becomes_an_input() -> None:
    gm, found = planned(lambda w, x: x.to(BF16) @ w.to(BF16))
    assert text(gm.graph) == [
        "w = placeholder",
        "x = placeholder",
        "_to_copy = aten._to_copy(x)",
        "_to_copy_1 = aten._to_copy(w)",
        "mm = aten.mm(_to_copy, _to_copy_1)",
        "return mm",
    ]
    split(gm, found)
    [spec] = found.values
    assert text(spec.outputs[0].graph) == [
        "weight_0 = placeholder",
        "_to_copy_1 = aten._to_copy(weight_0)",
    ]
    assert text(gm.graph) == [
        "x = placeholder",
        "_to_copy_1_cached = placeholder",
        "_to_copy = aten._to_copy(x)",
        "mm = aten.mm(_to_copy, _to_copy_1_cached)",
        "return mm",
    ]
    assert (found.passed, found.uncached) == ((1,), {})


def test_golden_views_stay_and_weights_that_are_read_become_aliases() -> None:
    gm, found = planned(lambda w, x: (x + w[0]).to(BF16) @ w.to(BF16).t())
    split(gm, found)
    assert text(gm.graph) == [
        "x = placeholder",
        "_to_copy_1_cached = placeholder",
        "w_alias = placeholder",
        "select = aten.select.int(w_alias, 0, 0)",
        "add = aten.add.Tensor(x, select)",
        "_to_copy = aten._to_copy(add)",
        "t = aten.t(_to_copy_1_cached)",
        "mm = aten.mm(_to_copy, t)",
        "return mm",
    ]
    assert [spec.is_alias for spec in found.values] == [False, True]


def test_planning_changes_nothing() -> None:
    gm = traced(lambda w, x: x @ (w * 2), W, X)
    before = text(gm.graph)
    found = [plan(gm, weights(W, None), 1) for _ in range(2)]
    assert text(gm.graph) == before
    assert [len(each.nodes) for each in found] == [1, 1]
    assert found[0].values[0].key(()) == found[1].values[0].key(())


def test_equal_values_are_one() -> None:
    gm, found = planned(lambda w, x: (x.to(BF16) @ w.to(BF16)) + (x.to(BF16) @ w.to(BF16)))
    assert len(found.nodes) == 2
    assert len(found.values) == 1
    split(gm, found)
    assert len(gm.graph.find_nodes(op="placeholder")) == 2


def test_a_value_of_two_weights_has_both() -> None:
    _, found = planned(lambda w, v, x: x @ (w * v), num_weights=2)
    [spec] = found.values
    assert (spec.positions, spec.names, spec.ops) == ((0, 1), ("a", "b"), ("mul",))


OPS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t * 2,
    lambda t: t.t(),
    lambda t: t.tanh(),
    lambda t: t.to(BF16).float(),
    lambda t: t + 1,
    lambda t: t[:2].repeat(2, 1),
]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.sampled_from("wvxy")), min_size=1, max_size=8),
    returned=st.sampled_from("wvxy"),
)
def test_the_rest_computes_the_same(steps: list[tuple[int, str]], returned: str) -> None:
    """The oracle is the graph before the split."""

    def program(w: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Any:
        values = {"w": w, "v": v, "x": x, "y": x @ w.t() @ v}
        for op, name in steps:
            values[name] = OPS[op](values[name])
        return values["y"] @ (values["w"] + values["v"]).t(), values["x"] * 2, values[returned]

    args = (W, V, torch.randn(4, 4))
    gm = traced(program, *args)
    expected = gm(*args)
    found = plan(gm, weights(W, V, None), 3)
    if found.nodes:
        split(gm, found)
        gm.graph.lint()
        gm.recompile()
        inputs = [*(args[i] for i in found.passed), *computed(found.values, args)]
        for a, b in zip(gm(*inputs), expected, strict=True):
            assert torch.equal(a, b)
        names = {spec.names for spec in found.computed}
        assert not {name for each in names for name in each} & set(found.uncached)
