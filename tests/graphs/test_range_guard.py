"""range_guard: numbers that the low dtype cannot hold are found, and what is done about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from amp_fx.backend.pipeline import captured_passes, run_passes
from amp_fx.graphs.records import AutocastSite
from amp_fx.policies.policy import preset
from amp_fx.regions.state import AutocastState
from tests.programs import compiled, site

if TYPE_CHECKING:
    from tests.programs import Program

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


# What it finds, and what it does about it.


def guarded(program: Program, x: torch.Tensor) -> list[str]:
    """Returns the metadata that the guard writes to nodes of the program's graph, for float16."""
    found: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Program:
        here = AutocastState.ambient()
        at = site(torch.float16) if not here.enabled else AutocastSite(here, is_grad_enabled=False)
        run_passes(gm, captured_passes(preset("torch"), at, restores_outputs=True), check=True)
        found.extend(n.meta["range_guard"] for n in gm.graph.nodes if "range_guard" in n.meta)
        return gm

    torch.compile(program, backend=backend)(x)
    torch._dynamo.reset()
    return found


CLAMPED: dict[str, Program] = {
    "masked_fill": lambda x: (x @ x).masked_fill(x > 0, -1e9),
    "where": lambda x: torch.where(x > 0, x @ x, -1e9),
    "where with a tensor": lambda x: torch.where(x > 0, x @ x, torch.full([], -1e9)),
    "full_like": lambda x: torch.full_like(x @ x, -1e9),
    "index_fill": lambda x: (x @ x).index_fill(0, torch.tensor([0]), -1e9),
    "clamp": lambda x: (x @ x).clamp(-1e9, 1e9),
}
IN_FLOAT32: dict[str, Program] = {
    "mul": lambda x: (x @ x) * 1e9,
    "sub": lambda x: 1e9 - (x @ x),
    "div": lambda x: (x @ x) / 1e-9,
    "add": lambda x: (x @ x) / ((x @ x) * 0 + 1e-8),
    "clamp_min": lambda x: (x @ x).relu().clamp(min=1e-9),
}


REFUSED = ("masked_fill", "full_like", "index_fill", "clamp")
"""What eager float16 refuses to run."""


@pytest.mark.parametrize("name", CLAMPED)
def test_fills_are_clamped(name: str, x: torch.Tensor) -> None:
    """Compares with the program that uses float16's limit instead of 1e9."""
    [record] = guarded(CLAMPED[name], x)
    assert record.startswith(f"{name.split()[0]}: -1e+09 clamped to -65504, the limit of float16")
    result = compiled(CLAMPED[name], dtype="float16")(x)
    expected = CLAMPED[name](x).clamp(-65504, 65504)
    assert result.isfinite().all()
    torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_other_ops_stay_in_float32(name: str, x: torch.Tensor) -> None:
    """Compares with the program in float32 that gets float16 products."""
    [record] = guarded(IN_FLOAT32[name], x)
    assert "in float16: computed in float32" in record or "overflows float16: computed" in record
    result = compiled(IN_FLOAT32[name], dtype="float16")(x)
    assert result.isfinite().all()
    torch.testing.assert_close(result, IN_FLOAT32[name](x), atol=1e-2, rtol=1e-1)


@pytest.mark.parametrize("name", [*CLAMPED, *IN_FLOAT32])
def test_ambient_numbers_are_those_of_eager_autocast(name: str, x: torch.Tensor) -> None:
    """Infinities included; what eager refuses to run is clamped."""
    program = {**CLAMPED, **IN_FLOAT32}[name]
    with torch.autocast("cpu", torch.float16):
        records = guarded(program, x)
        actual = compiled(program)(x)
        if name in REFUSED:
            with pytest.raises(RuntimeError, match="without overflow"):
                program(x)
            assert actual.isfinite().all()
            assert "clamped" in records[0]
            return
        expected = program(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert all("as in eager autocast" in record for record in records)


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_turned_off_it_is_eager_autocast(name: str, x: torch.Tensor) -> None:
    program = IN_FLOAT32[name]
    with torch.autocast("cpu", torch.float16):
        expected = program(x).float()
    actual = compiled(program, dtype="float16", range_guard=False)(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_turned_off_a_fill_that_overflows_raises(x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="without overflow"):
        compiled(CLAMPED["masked_fill"], dtype="float16", range_guard=False)(x)


def test_numbers_that_fit_are_not_mentioned(x: torch.Tensor) -> None:
    assert not guarded(lambda x: ((x @ x) * 2 + 1e-6).clamp(0, 100).masked_fill(x > 0, -1e4), x)
    assert not guarded(lambda x: x * 1e9 + 1e-9, x), "float32 stays float32"
