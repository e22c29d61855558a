"""restore_outputs: the bare way in gives back the dtypes of the uncompiled program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from amp_fx.backend.pipeline import run_passes
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.passes.restore_outputs import RestoreOutputs
from tests.programs import assert_same_bits, compiled, run_program, site

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from amp_fx.policies.policy import Policy
    from tests.programs import Captured, Program


def restore(captured: Captured, policy: Policy) -> Counter[str]:
    """Runs the pass after those that it needs; checks the graph."""
    passes = (MarkRegions(site()), InsertCasts(policy), RestoreOutputs())
    return run_passes(captured.gm, passes, check=True)[-1].counts


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 4, generator=rng).requires_grad_()


def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ x
    return y, y.argmax(), y.detach().prod(0)


def test_golden(capture: Callable[..., Captured], policy: Policy, x: torch.Tensor) -> None:
    captured = capture(several, x)
    run_passes(captured.gm, (MarkRegions(site()), InsertCasts(policy)))
    assert captured.text().splitlines()[-1] == "return (matmul, argmax, prod)"
    assert RestoreOutputs().call(captured.gm).counts == {"outputs_restored": 1}
    assert captured.text().splitlines()[-2:] == [
        "matmul_f32: f32 = aten._to_copy.default(matmul, dtype=torch.float32)",
        "return (matmul_f32, argmax, prod)",
    ]


def region(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


UNTOUCHED = {
    "float32": lambda x: x + 1,
    "integer": lambda x: (x @ x).argmax(),
    "low by the user's cast": lambda x: (x + 1).bfloat16(),
    "low by the user's region": region,
}


@pytest.mark.parametrize("program", UNTOUCHED.values(), ids=UNTOUCHED)
def test_non_matches_are_untouched(
    capture: Callable[..., Captured], policy: Policy, x: torch.Tensor, program: Program
) -> None:
    captured = capture(program, x)
    run_passes(captured.gm, (MarkRegions(site()), InsertCasts(policy)))
    before = captured.text()
    assert not RestoreOutputs().call(captured.gm).modified
    assert captured.text() == before


def test_output_returned_twice_stays_one_tensor(policy: Policy, x: torch.Tensor) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ x
        return y, y

    first, second = compiled(program, policy=policy)(x)
    assert first is second
    assert first.dtype == torch.float32


def test_second_run_changes_nothing(
    capture: Callable[..., Captured], policy: Policy, x: torch.Tensor
) -> None:
    captured = capture(several, x)
    assert restore(captured, policy)
    before = captured.text()
    assert not RestoreOutputs().call(captured.gm).modified
    assert captured.text() == before


def test_numbers(capture: Callable[..., Captured], policy: Policy, x: torch.Tensor) -> None:
    def restored(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = several(x)
        return outputs[0].float(), *outputs[1:]

    captured = capture(several, x)
    restore(captured, policy)
    expected = run_program(restored, [x], torch.bfloat16, cache_enabled=False)
    assert_same_bits(run_program(captured, [x]), expected)
