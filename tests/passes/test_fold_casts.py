"""fold_casts: shares what eager autocast shares, and what no gradient can tell apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from amp_fx.backend.pipeline import run_passes
from amp_fx.passes.fold_casts import FoldCasts
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.mark_regions import MarkRegions
from tests.programs import assert_same_bits, matrices, run_program, site

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from amp_fx.graphs.decompose import Site
    from amp_fx.policies.policy import Policy
    from tests.programs import Captured, Program


def fold(captured: Captured, policy: Policy, where: Site | None = None) -> Counter[str]:
    """Runs the pass after those that it needs; checks the graph."""
    passes = (MarkRegions(where or site()), InsertCasts(policy), FoldCasts())
    return run_passes(captured.gm, passes, check=True)[-1].counts


def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w) @ w


def test_golden_casts_of_a_leaf_are_shared(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(twice, *matrices(rng))
    run_passes(captured.gm, (MarkRegions(site()), InsertCasts(policy)))
    assert captured.text().splitlines()[1:-1] == [
        "w_bf16: bf16 = aten._to_copy.default(w, dtype=torch.bfloat16)",
        "x_bf16: bf16 = aten._to_copy.default(x, dtype=torch.bfloat16)",
        "matmul: bf16 = aten.matmul.default(x_bf16, w_bf16)",
        "w_bf16_1: bf16 = aten._to_copy.default(w, dtype=torch.bfloat16)",
        "matmul_1: bf16 = aten.matmul.default(matmul, w_bf16_1)",
    ]
    assert run_passes(captured.gm, (FoldCasts(),), check=True)[0].counts == {"casts_shared": 1}
    assert captured.text().splitlines()[1:-1] == [
        "w_bf16: bf16 = aten._to_copy.default(w, dtype=torch.bfloat16)",
        "x_bf16: bf16 = aten._to_copy.default(x, dtype=torch.bfloat16)",
        "matmul: bf16 = aten.matmul.default(x_bf16, w_bf16)",
        "matmul_1: bf16 = aten.matmul.default(matmul, w_bf16)",
    ]


def test_golden_round_trip_is_removed(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(lambda x, w: (x @ w).float() @ x, *matrices(rng))
    assert fold(captured, policy)["round_trips_removed"] == 1
    assert captured.text().splitlines()[1:-1] == [
        "w_bf16: bf16 = aten._to_copy.default(w, dtype=torch.bfloat16)",
        "x_bf16: bf16 = aten._to_copy.default(x, dtype=torch.bfloat16)",
        "matmul: bf16 = aten.matmul.default(x_bf16, w_bf16)",
        "matmul_1: bf16 = aten.matmul.default(matmul, x_bf16)",
    ]


def of_activation(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x + 1
    return (y @ w) + (y @ y)


def of_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    t = w.t()
    return (x @ t) @ t


def written_between(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = y @ w
    y.mul_(2)
    return z + y @ x


def used_after_widening(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = (x @ w).float()
    return wide @ x + wide


def narrowed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).half() @ x.half()


KEPT_UNDER_GRADIENTS = {
    "activation": of_activation,
    "view of a leaf": of_view,
    "written between": written_between,
    "widened value has other users": used_after_widening,
    "to another low dtype": narrowed,
}


@pytest.mark.parametrize("program", KEPT_UNDER_GRADIENTS.values(), ids=KEPT_UNDER_GRADIENTS)
def test_non_matches_are_untouched(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy, program: Program
) -> None:
    args = matrices(rng)
    captured = capture(program, *args)
    run_passes(captured.gm, (MarkRegions(site()), InsertCasts(policy)))
    # Leaves that are used twice are shared in any case: leave them out of the picture.
    before = [line for line in captured.text().splitlines() if not line.startswith(("x_", "w_"))]
    FoldCasts().call(captured.gm)
    after = [line for line in captured.text().splitlines() if not line.startswith(("x_", "w_"))]
    assert len(after) == len(before)


def test_leaf_that_is_a_view_is_not_shared(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    """Eager autocast caches no casts of views, even of those that are leaves."""
    storage = torch.randn(4, 8, generator=rng)
    captured = capture(twice, matrices(rng)[0], storage[:, :4].requires_grad_())
    assert not fold(captured, policy)


def test_without_gradients_everything_equal_is_shared(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(of_activation, *matrices(rng, is_frozen=True))
    assert fold(captured, policy)["casts_shared"] == 2


def test_without_gradients_a_write_between_separates(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    args = matrices(rng, is_frozen=True)
    captured = capture(written_between, *args)
    assert not fold(captured, policy)
    assert_same_bits(
        run_program(captured, args), run_program(written_between, args, torch.bfloat16)
    )


def test_cache_disabled_shares_nothing_under_gradients(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(twice, *matrices(rng))
    assert not fold(captured, policy, site(cache_enabled=False))


def test_casts_the_user_wrote_stay(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(lambda w: w.bfloat16() + w.bfloat16(), matrices(rng)[0])
    assert not fold(captured, policy)
    assert captured.text().count(".bfloat16(w)") == 2


def test_second_run_changes_nothing(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    captured = capture(lambda x, w: twice((x @ w).float(), w), *matrices(rng))
    assert fold(captured, policy)
    before = captured.text()
    assert not FoldCasts().call(captured.gm).modified
    assert captured.text() == before


def test_bodies_are_folded(
    capture: Callable[..., Captured], rng: torch.Generator, policy: Policy
) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(twice, x, w, use_reentrant=False)
        return result

    args = matrices(rng)
    captured = capture(program, *args)
    assert fold(captured, policy) == {"casts_shared": 1}
    assert_same_bits(run_program(captured, args), run_program(program, args, torch.bfloat16))


NUMERIC = {
    "leaf": twice,
    "round trip": lambda x, w: (x @ w).float() @ x,
    **{name: p for name, p in KEPT_UNDER_GRADIENTS.items() if p is not narrowed},
}


@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("program", NUMERIC.values(), ids=NUMERIC)
def test_numbers(
    capture: Callable[..., Captured],
    rng: torch.Generator,
    policy: Policy,
    program: Program,
    cache_enabled: bool,
) -> None:
    args = matrices(rng)
    captured = capture(program, *args)
    fold(captured, policy, site(cache_enabled=cache_enabled))
    expected = run_program(program, args, torch.bfloat16, cache_enabled=cache_enabled)
    assert_same_bits(run_program(captured, args), expected)
