"""The graphs that the cache works for: which casts become inputs, and what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from amp_fx import weight_cache
from amp_fx.backend.pipeline import run_passes
from amp_fx.graphs.conditions import check_graph
from amp_fx.passes.fold_casts import FoldCasts
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.keep_weight_casts import KeepWeightCasts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.weights.kept_cast import kept_cast
from tests.programs import Captured, graph_text, site

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.policies.policy import Policy


@pytest.fixture
def keep(capture: Callable[..., Captured], policy: Policy) -> Callable[..., Any]:
    """Captures a program of a batch and weights and runs the pass on it."""

    def run(
        program: Callable[..., Any],
        *args: torch.Tensor,
        is_grad_enabled: bool = True,
        cache_enabled: bool = True,
    ) -> tuple[Captured, KeepWeightCasts, Any]:
        with torch.set_grad_enabled(is_grad_enabled):
            captured = capture(program, *args)
        where = site(is_grad_enabled=is_grad_enabled, cache_enabled=cache_enabled)
        run_passes(captured.gm, (MarkRegions(where), InsertCasts(policy), FoldCasts()), check=True)
        placeholders = captured.gm.graph.find_nodes(op="placeholder")
        weights = tuple(
            (node.name, (node.name,))
            for node, i in zip(placeholders, captured.order, strict=True)
            if isinstance(args[i], torch.nn.Parameter)
        )
        keep_pass = KeepWeightCasts(weights)
        result = keep_pass.call(captured.gm)
        captured.gm.recompile()
        check_graph(captured.gm, keep_pass.name)
        return captured, keep_pass, result

    return run


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight)


def batch() -> torch.Tensor:
    return torch.ones(2, 4)


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4, 4))


def test_where_gradients_flow(keep: Callable[..., Any]) -> None:
    captured, _, result = keep(linear, batch(), weight())
    assert result.counts == {"weight_casts_kept": 1}
    assert graph_text(captured.gm) == (
        "graph(x: f32, weight: f32, weight__bfloat16_kept: bf16)\n"
        "kept_cast: bf16 = amp_fx.kept_cast.default(weight, weight__bfloat16_kept)\n"
        "x_bf16: bf16 = aten._to_copy.default(x, dtype=torch.bfloat16)\n"
        "linear: bf16 = aten.linear.default(x_bf16, kept_cast)\n"
        "return (linear,)"
    )


def test_where_none_flow(keep: Callable[..., Any]) -> None:
    captured, _, result = keep(linear, batch(), weight(), is_grad_enabled=False)
    assert result.counts == {"weight_casts_kept": 1}
    assert graph_text(captured.gm) == (
        "graph(x: f32, weight: f32, weight__bfloat16_kept: bf16)\n"
        "x_bf16: bf16 = aten._to_copy.default(x, dtype=torch.bfloat16)\n"
        "linear: bf16 = aten.linear.default(x_bf16, weight__bfloat16_kept)\n"
        "return (linear,)"
    )


def kept_inputs(captured: Captured) -> list[Any]:
    placeholders = captured.gm.graph.find_nodes(op="placeholder")
    return [n.meta["kept_input"] for n in placeholders if "kept_input" in n.meta]


def test_one_input_for_each_dtype(keep: Callable[..., Any]) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.float16):
            y = x @ w
        return y, x @ w, x @ w

    captured, _, _ = keep(program, batch(), weight())
    assert sorted(str(k.dtype) for k in kept_inputs(captured)) == [
        "torch.bfloat16",
        "torch.float16",
    ]
    casts = [n for n in captured.gm.graph.nodes if n.target is kept_cast]
    assert len(casts) == 2


def test_says_which_input(keep: Callable[..., Any]) -> None:
    def program(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ b + (x @ a).float() * a.sum()

    args = (weight(), weight(), torch.ones(4, 4))
    captured, _, _ = keep(program, *args)
    found = [args[captured.order[k.source_index]] for k in kept_inputs(captured)]
    assert {id(w) for w in found} == {id(args[0]), id(args[1])}


def writes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        w.mul_(2)
    return x @ w


LEFT_ALONE: dict[str, Callable[..., Any]] = {
    "a view is cast": lambda x, w: x @ w.t(),
    "written": writes,
    "cast by the user": lambda x, w: x.to(torch.bfloat16) @ w.to(torch.bfloat16),
    "no cast": lambda x, w: x + w.sum(),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(keep: Callable[..., Any], name: str) -> None:
    captured, _, result = keep(LEFT_ALONE[name], batch(), weight())
    assert not result.modified
    assert kept_inputs(captured) == []


def test_an_input_that_is_no_weight_is_left_alone(keep: Callable[..., Any]) -> None:
    _, _, result = keep(linear, batch(), torch.ones(4, 4))
    assert not result.modified


def test_a_region_without_cache_is_left_alone(keep: Callable[..., Any]) -> None:
    _, _, result = keep(linear, batch(), weight(), cache_enabled=False)
    assert not result.modified


def test_a_weight_written_under_another_name_is_left_alone(
    capture: Callable[..., Captured], policy: Policy
) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        flat.mul_(2)
        return x @ w

    captured = capture(program, batch(), weight(), torch.ones(16))
    run_passes(captured.gm, (MarkRegions(site()), InsertCasts(policy), FoldCasts()))
    names = [n.name for n in captured.gm.graph.find_nodes(op="placeholder")]
    order = [names[captured.order.index(i)] for i in range(3)]
    shared = ((order[1], (order[1], order[2])),)
    assert not KeepWeightCasts(shared).call(captured.gm).modified
    assert KeepWeightCasts(((order[1], (order[1],)),)).call(captured.gm).modified


@pytest.mark.parametrize("is_grad_enabled", [True, False])
def test_second_run_changes_nothing(keep: Callable[..., Any], is_grad_enabled: bool) -> None:
    captured, keep_pass, _ = keep(linear, batch(), weight(), is_grad_enabled=is_grad_enabled)
    before = captured.text()
    assert not keep_pass.call(captured.gm).modified
    assert captured.text() == before


def test_values_are_fresh(keep: Callable[..., Any]) -> None:
    captured, _, _ = keep(linear, batch(), weight())
    added = captured.gm.graph.find_nodes(op="placeholder")[-1].meta["val"]
    assert (added.dtype, added.requires_grad) == (torch.bfloat16, False)
    [cast] = captured.gm.graph.find_nodes(op="call_function", target=kept_cast)
    assert (cast.meta["val"].dtype, cast.meta["val"].requires_grad) == (torch.bfloat16, True)


def test_kept_cast_differentiates_as_the_cast_does() -> None:
    p = weight()
    low = p.detach().to(torch.bfloat16)
    out = kept_cast(p, low)
    assert out.dtype == torch.bfloat16
    seed = torch.full((4, 4), 1.1).to(torch.bfloat16)
    [actual] = torch.autograd.grad(out, p, seed)
    [expected] = torch.autograd.grad(p.to(torch.bfloat16), p, seed)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)


def test_where_no_write_would_be_noticed_casts_stay_in_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on MPS; the CPU stands for it here."""
    monkeypatch.setattr("amp_fx.weights.kept_inputs.DEVICES", ("cuda", "xpu"))
    weight_cache.clear()
    net = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4)
    out = torch.compile(net, backend="amp_fx", options={"compiler": "eager"})(x)
    assert not weight_cache.stats().entries
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(out, net(x).float())
