"""restore_outputs: the bare way in gives back the dtypes of the uncompiled program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from amp_fx.backend.pipeline import run_passes
from amp_fx.passes.insert_casts import InsertCasts
from amp_fx.passes.mark_regions import MarkRegions
from amp_fx.passes.restore_outputs import RestoreOutputs
from tests.programs import POLICY, capture_program, compiled, run_settling, site

if TYPE_CHECKING:
    from tests.programs import Program


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 4, generator=rng).requires_grad_()


def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ x
    return y, y.argmax(), y.detach().prod(0)


def test_golden(x: torch.Tensor) -> None:
    captured = capture_program(several, x)
    run_passes(captured.gm, (MarkRegions(site()), InsertCasts(POLICY)))
    assert captured.text().splitlines()[-1] == "return (matmul, argmax, prod)"
    assert run_settling(captured.gm, [RestoreOutputs()]) == {"outputs_restored": 1}
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
def test_non_matches_are_untouched(x: torch.Tensor, program: Program) -> None:
    captured = capture_program(program, x)
    run_passes(captured.gm, (MarkRegions(site()), InsertCasts(POLICY)))
    before = captured.text()
    assert not RestoreOutputs().call(captured.gm).modified
    assert captured.text() == before


def test_output_returned_twice_stays_one_tensor(x: torch.Tensor) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ x
        return y, y

    first, second = compiled(program, policy=POLICY)(x)
    assert first is second
    assert first.dtype == torch.float32
