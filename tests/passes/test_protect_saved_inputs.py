"""ProtectSavedInputs: AOTAutograd does not donate inputs that the forward saves."""

from __future__ import annotations

import pytest
import torch

from amp_fx.passes import protect_saved_inputs
from amp_fx.passes.protect_saved_inputs import ProtectSavedInputs
from tests.weights.aot_graphs import text, traced

X, CACHED = torch.ones(2, 3), torch.ones(3, 2)


def forward(x: torch.Tensor, cached: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ cached
    return y, x, cached.t(), y * 2


@pytest.mark.parametrize(("num_returned", "saved"), [(1, [1, 2]), (2, [2]), (4, [])])
def test_golden(monkeypatch: pytest.MonkeyPatch, num_returned: int, saved: list[int]) -> None:
    protected: list[list[int]] = []
    monkeypatch.setattr(protect_saved_inputs, "keep_saved", protected.append)
    gm = traced(forward, X, CACHED)
    before = text(gm.graph)
    assert not ProtectSavedInputs(num_returned).call(gm).modified
    assert text(gm.graph) == before
    assert protected == [saved]
