"""share_region_casts: casts that eager autocast caches are taken from its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from amp_fx.backend.pipeline import default_passes, run_passes
from amp_fx.passes.share_region_casts import ShareRegionCasts
from amp_fx.weights.kept_cast import kept_cast
from tests.programs import site

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from amp_fx.policies.policy import Policy
    from tests.programs import Captured, Program


def share(captured: Captured, policy: Policy, *, keeps: bool = False) -> Counter[str]:
    """Runs the pipeline, with the input ``w`` as a weight to keep if asked; checks the graph."""
    name = captured.node("w").name
    kept = ((name, (name,)),) if keeps else ()
    passes = default_passes(
        policy, site(), restores_outputs=False, kept_weights=kept, shares_region=True
    )
    [report] = [
        report
        for report in run_passes(captured.gm, passes, check=True)
        if report.name == ShareRegionCasts.name
    ]
    return report.counts


def matrices(rng: torch.Generator, *, is_frozen: bool = False) -> list[torch.Tensor]:
    x, w = (torch.randn(4, 4, generator=rng) for _ in range(2))
    return [x, w.requires_grad_(not is_frozen)]


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def test_golden(capture: Callable[..., Captured], rng: torch.Generator, policy: Policy) -> None:
    captured = capture(product, *matrices(rng))
    assert share(captured, policy) == {"region_casts": 1}
    assert captured.text().splitlines()[1:-1] == [
        "w_bf16: bf16 = aten._to_copy.default(w, dtype=torch.bfloat16)",
        "region_cast: bf16 = region_cast(w, w_bf16)",
        "x_bf16: bf16 = aten._to_copy.default(x, dtype=torch.bfloat16)",
        "matmul: bf16 = aten.matmul.default(x_bf16, region_cast)",
    ]


def test_golden_kept_cast(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(product, *matrices(rng))
    assert share(captured, policy, keeps=True) == {"region_casts": 1}
    assert "region_cast(w, w__bfloat16_kept)" in captured.text()
    assert not captured.gm.graph.find_nodes(op="call_function", target=kept_cast)


UNTOUCHED: dict[str, Program] = {
    "activation": lambda x, w: (x * w) @ x,
    "view": lambda x, w: x @ w.t(),
}


@pytest.mark.parametrize("program", UNTOUCHED.values(), ids=UNTOUCHED)
def test_what_eager_does_not_cache_is_untouched(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy, program: Program
) -> None:
    assert not share(capture(program, *matrices(rng)), policy)


def test_frozen_weights_are_untouched(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    assert not share(capture(product, *matrices(rng, is_frozen=True)), policy)


def test_second_run_changes_nothing(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(product, *matrices(rng))
    assert share(captured, policy)
    assert not ShareRegionCasts().call(captured.gm).modified
