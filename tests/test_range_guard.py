"""fills: a baked fill value stays inside the range of a tensor that became narrower."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.graphs import compiled

if TYPE_CHECKING:
    from tests.graphs import Program

LOWEST = torch.finfo(torch.float32).min
INFINITY = float("inf")


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 4, generator=rng)


def masked(x: torch.Tensor) -> torch.Tensor:
    y = x @ x
    return y.masked_fill(y > 0, torch.finfo(y.dtype).min)


def masked_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x @ x
    return y.masked_fill_(y > 0, torch.finfo(y.dtype).min)


PROGRAMS = {"masked_fill": masked, "masked_fill_": masked_in_place}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_fill_is_the_one_of_the_narrow_dtype(
    x: torch.Tensor, program: Program, dtype: torch.dtype
) -> None:
    """The program would have asked for the low dtype's own minimum."""
    with torch.autocast("cpu", dtype):
        expected = program(x)
    assert torch.equal(compiled(program, dtype=dtype)(x), expected.float())


@pytest.mark.parametrize("value", [INFINITY, -INFINITY, 3.5, True])
def test_values_inside_the_range_and_infinities_stay(x: torch.Tensor, value: float) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).masked_fill(x > 0, value)

    result = compiled(program, dtype="float16")(x)
    assert (result[x > 0] == value).all()


def test_float32_tensors_keep_their_fill(x: torch.Tensor) -> None:
    result = compiled(lambda x: x.masked_fill(x > 0, LOWEST), dtype="float16")(x)
    assert (result[x > 0] == LOWEST).all()
