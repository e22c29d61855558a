"""Weights that are kept and read in their own dtype as well: which uses go through the alias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from amp_fx.backend.pipeline import run_passes
from amp_fx.graphs.conditions import check_graph
from amp_fx.passes.alias_weight_reads import AliasWeightReads
from amp_fx.passes.fold_casts import FoldCasts
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.keep_weight_casts import KeepWeightCasts
from amp_fx.passes.mark_regions import MarkRegions
from tests.programs import Captured, graph_text, site

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.policies.policy import Policy


@pytest.fixture
def rewrite(capture: Callable[..., Captured], policy: Policy) -> Callable[..., Any]:
    """Captures a program of weights, runs the passes up to this one, then this one."""

    def run(
        program: Callable[..., Any], *args: torch.Tensor, is_grad_enabled: bool = True
    ) -> tuple[Captured, dict[str, int]]:
        with torch.set_grad_enabled(is_grad_enabled):
            captured = capture(program, *args)
        names = [node.name for node in captured.gm.graph.find_nodes(op="placeholder")]
        keep = KeepWeightCasts(tuple((name, (name,)) for name in names if name.endswith("w_")))
        before = (MarkRegions(site(is_grad_enabled=is_grad_enabled)), InsertCasts(policy))
        run_passes(captured.gm, (*before, FoldCasts(), keep), check=True)
        result = AliasWeightReads().call(captured.gm)
        captured.gm.recompile()
        check_graph(captured.gm, AliasWeightReads.name)
        return captured, dict(result.counts)

    return run


def tied(tokens: torch.Tensor, w_: torch.Tensor) -> torch.Tensor:
    return functional.linear(functional.embedding(tokens, w_), w_)


def tokens() -> torch.Tensor:
    return torch.tensor([0, 2])


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4, 4))


def test_where_gradients_flow(rewrite: Callable[..., Any]) -> None:
    captured, counts = rewrite(tied, tokens(), weight())
    assert counts == {"weight_reads_aliased": 1}
    text = graph_text(captured.gm)
    assert "w__float32_alias: f32" in text.splitlines()[0]
    assert "kept_cast.default(w, w__float32_alias)" in text
    embedding = next(n for n in captured.gm.graph.nodes if "embedding" in str(n.target))
    assert all(n.name != "w" for n in embedding.all_input_nodes)


def test_where_none_flow_the_weight_is_not_used_at_all(rewrite: Callable[..., Any]) -> None:
    captured, counts = rewrite(tied, tokens(), weight(), is_grad_enabled=False)
    assert counts == {"weight_reads_aliased": 1}
    placeholders = captured.gm.graph.find_nodes(op="placeholder")
    [source] = [node for node in placeholders if node.meta["val"].requires_grad]
    assert not source.users


def test_a_second_run_changes_nothing(rewrite: Callable[..., Any]) -> None:
    captured, _ = rewrite(tied, tokens(), weight())
    before = graph_text(captured.gm)
    assert not AliasWeightReads().call(captured.gm).counts
    assert graph_text(captured.gm) == before


def test_what_an_output_may_alias_is_left_alone(rewrite: Callable[..., Any]) -> None:
    def program(tokens: torch.Tensor, w_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tied(tokens, w_), w_.t()[1:]

    _, counts = rewrite(program, tokens(), weight())
    assert counts == {}


def test_a_weight_that_is_not_kept_is_left_alone(rewrite: Callable[..., Any]) -> None:
    def program(tokens: torch.Tensor, w_: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, w_)

    _, counts = rewrite(program, tokens(), weight())
    assert counts == {}


def test_every_use_has_a_gradient_of_its_own(rewrite: Callable[..., Any]) -> None:
    """Summed in any other order, gradients of several uses would differ in their last bits."""

    def program(t: torch.Tensor, w_: torch.Tensor) -> torch.Tensor:
        return tied(t, w_) * w_.sum() + functional.embedding(t, w_)

    captured, counts = rewrite(program, tokens(), weight())
    assert counts == {"weight_reads_aliased": 3}
    text = graph_text(captured.gm)
    assert text.count("kept_cast.default(w, w__float32_alias)") == 3


def test_weights_that_the_graph_casts_itself_are_read_through_aliases_too(
    capture: Callable[..., Captured], policy: Policy
) -> None:
    """Another variant of the graph keeps their casts: its calls must not see reads as writes."""
    captured = capture(tied, tokens(), weight())
    run_passes(captured.gm, (MarkRegions(site()), InsertCasts(policy), FoldCasts()), check=True)
    assert not AliasWeightReads().call(captured.gm).counts
    [name] = [n.name for n in captured.gm.graph.find_nodes(op="placeholder") if n.name[-2:] == "w_"]
    found = AliasWeightReads(((name, (name,)),)).call(captured.gm)
    captured.gm.recompile()
    check_graph(captured.gm, AliasWeightReads.name)
    assert found.counts == {"weight_reads_aliased": 2}  # by the embedding, and by the cast
    assert graph_text(captured.gm).count("kept_cast.default(w, w__float32_alias)") == 2


def test_weights_that_are_not_cast_are_left_alone(
    capture: Callable[..., Captured], policy: Policy
) -> None:
    captured = capture(functional.embedding, tokens(), weight())
    run_passes(captured.gm, (MarkRegions(site()), InsertCasts(policy), FoldCasts()), check=True)
    names = [node.name for node in captured.gm.graph.find_nodes(op="placeholder")]
    assert not AliasWeightReads(tuple((name, (name,)) for name in names)).call(captured.gm).counts
