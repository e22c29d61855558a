"""fallback: a graph that cannot be rewritten runs as eager autocast runs it."""

from __future__ import annotations

import logging

import pytest
import torch

from amp_fx.backend import fallback
from amp_fx.backend.fallback import as_native_region, warn_fallback
from amp_fx.errors import PassError
from tests.programs import assert_same_bits, capture_program, run_program, site

pytestmark = pytest.mark.falls_back


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ w
    with torch.autocast("cpu", enabled=False):
        z = x.float() @ w
    return y, z, (y > 0).sum()


@pytest.fixture
def args(rng: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(4, 4, generator=rng).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_the_region(args: list[torch.Tensor], dtype: torch.dtype) -> None:
    captured = capture_program(program, *args)
    as_native_region(captured.gm, site(dtype).state, restores_outputs=False)
    assert_same_bits(run_program(captured, args), run_program(program, args, dtype))


def test_outputs_get_the_captured_dtypes(args: list[torch.Tensor]) -> None:
    captured = capture_program(program, *args)
    as_native_region(captured.gm, site().state, restores_outputs=True)
    y, z, count = run_program(captured, args).outputs
    expected = run_program(program, args, torch.bfloat16).outputs
    assert [y.dtype, z.dtype, count.dtype] == [torch.float32, torch.float32, torch.int64]
    assert torch.equal(y, expected[0].float())
    assert torch.equal(z, expected[1])


def test_without_a_region_nothing_changes(args: list[torch.Tensor]) -> None:
    captured = capture_program(program, *args)
    before = captured.text()
    as_native_region(captured.gm, site(enabled=False).state, restores_outputs=False)
    assert captured.text() == before


def test_each_cause_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fallback, "_seen", set())
    with caplog.at_level(logging.WARNING, "amp_fx"):
        for cause in ("one", "two", "one"):
            warn_fallback(PassError(cause), torch.fx.Graph())
    messages = [r.getMessage() for r in caplog.records if r.name == "amp_fx.fallback"]
    assert [next(c for c in ("one", "two") if f": {c} (" in m) for m in messages] == ["one", "two"]
