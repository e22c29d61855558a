"""keep_weight_casts: casts of weights leave the graph and come back as inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from amp_fx.backend.pipeline import default_passes, run_passes
from amp_fx.graphs.values import evaluate, set_value, value_of
from amp_fx.passes.keep_weight_casts import KeepWeightCasts, _adds_behind, _is_read_whole
from amp_fx.weights.kept_cast import Slot
from tests.programs import Captured, assert_same_bits, matrices, run_program, site

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.policies.policy import Policy
    from tests.programs import Program, Run


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w) @ w


def keep(captured: Captured, policy: Policy, *, cache_enabled: bool = True) -> dict[str, int]:
    """Runs the pipeline with the input ``w`` as the only weight; checks the graph."""
    name = captured.node("w").name
    passes = default_passes(
        policy,
        site(cache_enabled=cache_enabled),
        restores_outputs=False,
        kept_weights=((name, (name,)),),
    )
    reports = run_passes(captured.gm, passes, check=True)
    [report] = [report for report in reports if report.name == KeepWeightCasts.name]
    return dict(report.counts)


def run_with_copy(captured: Captured, args: list[torch.Tensor]) -> Run:
    """Runs the graph with the copy that the cache would pass as its last input."""

    def call(*leaves: torch.Tensor) -> torch.Tensor:
        ordered = [leaves[i] for i in captured.order]
        result: torch.Tensor = captured.gm(*ordered, leaves[1].detach().bfloat16())[0]
        return result

    return run_program(call, args)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_numbers_and_the_added_input(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy, is_frozen: bool
) -> None:
    args = matrices(rng, is_frozen=is_frozen)
    captured = capture(linear, *args)
    assert keep(captured, policy) == {"weight_casts_kept": 1}
    placeholders = captured.gm.graph.find_nodes(op="placeholder")
    index = captured.order.index(1)
    assert placeholders[-1].meta["kept_input"] == Slot(index, torch.bfloat16, "w")
    assert "_to_copy.default(w" not in captured.text()
    assert_same_bits(run_with_copy(captured, args), run_program(linear, args, torch.bfloat16))


def behind_calls(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.contiguous() @ w.float() @ w


def test_calls_that_return_the_weight_itself_hide_nothing(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    args = matrices(rng)
    captured = capture(behind_calls, *args)
    assert keep(captured, policy) == {"weight_casts_kept": 1}
    assert_same_bits(run_with_copy(captured, args), run_program(behind_calls, args, torch.bfloat16))


def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    w.mul_(2)
    return x @ w


UNTOUCHED = {"weight that is written": written, "weight that is not cast": lambda x, w: x + w}


@pytest.mark.parametrize("program", UNTOUCHED.values(), ids=UNTOUCHED)
def test_non_matches_are_untouched(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy, program: Program
) -> None:
    captured = capture(program, *matrices(rng, is_frozen=True))
    assert not keep(captured, policy)
    assert len(captured.gm.graph.find_nodes(op="placeholder")) == 2


def test_cache_disabled_keeps_nothing(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(linear, *matrices(rng))
    assert not keep(captured, policy, cache_enabled=False)


def test_other_inputs_are_not_weights(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(linear, *matrices(rng))
    keep(captured, policy)
    assert "x_bf16: bf16 = aten._to_copy.default(x, dtype=torch.bfloat16)" in captured.text()


def test_second_run_changes_nothing(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(linear, *matrices(rng))
    assert keep(captured, policy)
    before = captured.text()
    name = captured.node("w").name
    assert not KeepWeightCasts(((name, (name,)),)).call(captured.gm).modified
    assert captured.text() == before


def convolution_of(device: str, place: int) -> tuple[fx.Node, fx.Node]:
    """A convolution of an input, a weight and a bias, and the cast of one of them."""
    graph = fx.Graph()
    args = [graph.placeholder(name) for name in ("x", "w", "b")]
    cast = graph.call_function(torch.ops.aten._to_copy.default, (args[place],))
    args[place] = cast
    with FakeTensorMode():
        set_value(cast, torch.empty(2, device=device))
    return graph.call_function(torch.ops.aten.conv2d.default, tuple(args)), cast


@pytest.mark.parametrize(
    ("device", "place", "is_free"), [("cuda", 2, True), ("cuda", 1, False), ("cpu", 2, False)]
)
def test_a_bias_that_inductor_adds_behind_the_convolution(
    device: str, place: int, is_free: bool
) -> None:
    """Its cast is fused there, on accelerators: ``tests/traffic/test_traffic.py`` counts it."""
    assert _adds_behind(*convolution_of(device, place)) == is_free


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("shape", "permuted", "is_free"),
    [((4, 8), None, False), ((2, 3, 8), None, False), ((3, 2, 8), (1, 0, 2), True)],
)
def test_a_bias_that_pytorch_adds_behind_the_product(
    shape: tuple[int, ...], permuted: tuple[int, ...] | None, device: str, is_free: bool
) -> None:
    """Of an input that is no matrix in memory: ``linear`` is ``matmul`` and ``add`` there."""
    gm = fx.symbolic_trace(lambda x, w, b: functional.linear(x, w, b.bfloat16()))
    [x, w, b] = gm.graph.find_nodes(op="placeholder")
    [cast] = gm.graph.find_nodes(op="call_method")
    with FakeTensorMode():
        low = {"dtype": torch.bfloat16, "device": device}
        given = torch.empty(shape, **low)  # type: ignore[call-overload]
        set_value(x, given if permuted is None else given.permute(permuted))
        set_value(w, torch.empty(8, 8, **low))  # type: ignore[call-overload]
        for node in (b, cast):
            set_value(node, torch.empty(8, **low))  # type: ignore[call-overload]
    [linear] = cast.users
    assert _adds_behind(linear, cast) == is_free


READS: dict[str, tuple[Callable[..., Any], bool]] = {
    "its norm": (lambda w, _: w.norm(), True),
    "elementwise": (lambda w, _: w * w, True),
    "with a number": (lambda w, rows: w * rows.size(0), True),
    "sums of its rows": (lambda w, _: w.sum(1), True),
    "through a view": (lambda w, _: torch.sum(w.view(-1) ** 2), True),
    "a part": (lambda w, _: w[:2].sum(), False),
    "some rows": (lambda w, rows: functional.embedding(rows, w), False),
    "a product": (lambda w, _: w @ w, False),
    "by nothing": (lambda w, _: w.view(-1), False),
}


def read_graph(read: Callable[..., Any], device: str) -> tuple[fx.GraphModule, fx.Node]:
    """A graph that reads a weight so, with values on a device."""
    gm = fx.symbolic_trace(read)
    weight, rows = gm.graph.find_nodes(op="placeholder")
    set_value(weight, torch.empty(4, 4, device=device))
    set_value(rows, torch.zeros(3, dtype=torch.long, device=device))
    for node in gm.graph.nodes:
        if node.op.startswith("call"):
            set_value(node, evaluate(node))
    return gm, weight


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("name", READS)
def test_what_reads_a_weight_whole_may_cast_it_on_accelerators(name: str, device: str) -> None:
    read, is_whole = READS[name]
    assert _is_read_whole(*read_graph(read, device)) == (is_whole and device == "meta")


def test_looking_for_what_reads_a_weight_whole_writes_no_value_of_the_graph() -> None:
    gm, weight = read_graph(lambda w, _: w.new_zeros(4, 4).add_(w), "meta")
    versions = [value_of(node)._version for node in gm.graph.nodes if node.op != "output"]
    assert _is_read_whole(gm, weight)
    assert versions == [value_of(n)._version for n in gm.graph.nodes if n.op != "output"]
