"""fold_casts: shares what eager autocast shares, and what no gradient can tell apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from amp_fx.backend.pipeline import run_passes
from amp_fx.passes.fold_casts import FoldCasts
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.mark_regions import MarkRegions
from tests.programs import (
    POLICY,
    assert_same_bits,
    capture_program,
    matrices,
    run_program,
    run_settling,
    site,
)

if TYPE_CHECKING:
    from collections import Counter

    from amp_fx.graphs.records import AutocastSite
    from tests.programs import Captured, Program


def fold(captured: Captured, where: AutocastSite | None = None) -> Counter[str]:
    """Runs the pass after those that it needs; checks the graph."""
    passes = (MarkRegions(where or site()), InsertCasts(POLICY), FoldCasts())
    return run_settling(captured.gm, passes)


def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w) @ w


def test_golden_casts_of_a_leaf_are_shared(rng: torch.Generator) -> None:
    captured = capture_program(twice, *matrices(rng))
    run_passes(captured.gm, (MarkRegions(site()), InsertCasts(POLICY)))
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


def test_golden_round_trip_is_removed(rng: torch.Generator) -> None:
    captured = capture_program(lambda x, w: (x @ w).float() @ x, *matrices(rng))
    assert fold(captured)["round_trips_removed"] == 1
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
def test_non_matches_are_untouched(rng: torch.Generator, program: Program) -> None:
    args = matrices(rng)
    captured = capture_program(program, *args)
    run_passes(captured.gm, (MarkRegions(site()), InsertCasts(POLICY)))
    # Leaves that are used twice are shared in any case: leave them out of the picture.
    before = [line for line in captured.text().splitlines() if not line.startswith(("x_", "w_"))]
    FoldCasts().call(captured.gm)
    after = [line for line in captured.text().splitlines() if not line.startswith(("x_", "w_"))]
    assert len(after) == len(before)


def test_leaf_that_is_a_view_is_not_shared(rng: torch.Generator) -> None:
    """Eager autocast caches no casts of views, even of those that are leaves."""
    storage = torch.randn(4, 8, generator=rng)
    captured = capture_program(twice, matrices(rng)[0], storage[:, :4].requires_grad_())
    assert not fold(captured)


def test_without_gradients_everything_equal_is_shared(rng: torch.Generator) -> None:
    captured = capture_program(of_activation, *matrices(rng, is_frozen=True))
    assert fold(captured)["casts_shared"] == 2


def test_without_gradients_a_write_between_separates(rng: torch.Generator) -> None:
    args = matrices(rng, is_frozen=True)
    captured = capture_program(written_between, *args)
    assert not fold(captured)
    assert_same_bits(
        run_program(captured, args), run_program(written_between, args, torch.bfloat16)
    )


def test_casts_the_user_wrote_stay(rng: torch.Generator) -> None:
    captured = capture_program(lambda w: w.bfloat16() + w.bfloat16(), matrices(rng)[0])
    assert not fold(captured)
    assert captured.text().count(".bfloat16(w)") == 2


def test_bodies_are_folded(rng: torch.Generator) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(twice, x, w, use_reentrant=False)
        return result

    args = matrices(rng)
    captured = capture_program(program, *args)
    assert fold(captured) == {"casts_shared": 1}
    assert_same_bits(run_program(captured, args), run_program(program, args, torch.bfloat16))
