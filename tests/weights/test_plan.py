"""plan: which weights of a program have cached values, and the reasons of the others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import weight_cache
from amp_fx.explanation import captured
from tests import needs
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs.HOOK


class Model(nn.Module):
    """A function of a parameter, a buffer and an input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(8, 8))
        self.b: torch.Tensor
        self.register_buffer("b", torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def writes(m: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = x @ m.b @ m.w
    m.b.add_(1)
    return y


PROGRAMS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "both are cast": (lambda m, x: x @ m.w @ m.b, {}),
    "read as it is": (lambda m, x: (x @ m.w) + m.b, {"b": "kernels read it as it is"}),
    "returned": (lambda m, x: (x @ m.w, m.b * 2), {"b": "its values are returned"}),
    "larger": (lambda m, x: (x @ m.w) @ m.b.repeat(1, 2), {"b": "larger than the weight"}),
    "written": (writes, {"b": "the graph writes to its memory"}),
    "float64": (lambda m, x: (x @ m.w).double() + m.b.double(), {"b": "larger than the weight"}),
    "a view is returned": (lambda m, x: (x @ m.w, (m.b * 2).t()), {"b": "its values are returned"}),
}
"""Programs without gradients, with the weights that have no cached value."""


@pytest.mark.parametrize(("function", "uncached"), PROGRAMS.values(), ids=PROGRAMS)
@torch.no_grad()
def test_what_is_cached_and_why_not(
    function: Callable[..., Any], uncached: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The log of a compilation, the explanation, and the cache agree."""
    model, x = Model(function), torch.randn(8, 8)
    [graph] = amp_fx.explain(model)(x).graphs
    explained = dict(graph.uncached)
    assert set(explained) == set(uncached)
    assert all(reason in explained[name] for name, reason in uncached.items())
    assert {w for value in graph.cached_values for w in value.weights} == {"w", "b"} - set(uncached)

    weight_cache.clear()
    with caplog.at_level(logging.DEBUG, "amp_fx.caching"):
        compiled(model, compiler="aot_eager")(x)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("not cached: ")]
    assert sorted(lines) == sorted(f"not cached: {n}: {why}" for n, why in explained.items())
    cached = {w for value in weight_cache.stats().values for w in value.weights}
    assert cached == {"w", "b"} - set(uncached)


def test_weights_that_get_gradients() -> None:
    model, x = Model(lambda m, x: x @ m.w @ m.b), torch.randn(8, 8)
    [graph] = amp_fx.explain(model)(x).graphs
    assert dict(graph.uncached) == {
        "w": "it gets a gradient, and options={'weight_cache': 'training'} is not set"
    }
    [graph] = amp_fx.explain(model, options={"weight_cache": "training"})(x).graphs
    assert graph.uncached == ()
    model.b = model.b.requires_grad_()
    [graph] = amp_fx.explain(model)(x).graphs
    assert {*dict(graph.uncached)} == {"w", "b"}


@torch.no_grad()
def test_weights_of_one_storage_of_which_one_is_written() -> None:
    model, x = Model(writes), torch.randn(8, 8)
    model.w = nn.Parameter(model.b.view(8, 8))
    [graph] = amp_fx.explain(model)(x).graphs
    assert set(dict(graph.uncached).values()) == {"the graph writes to its memory"}
    assert not graph.cached_values


@needs.FROZEN_GRAPHS
@torch.no_grad()
def test_weights_in_the_memory_of_others(caplog: pytest.LogCaptureFixture) -> None:
    """Values of the other weights stay cached, and a write through NumPy is never missed."""
    model, x = Model(lambda m, x: x @ m.w @ m.b), torch.randn(4, 8)
    array = np.ones((8, 8), dtype=np.float32)
    model.w = nn.Parameter(torch.from_numpy(array))
    with caplog.at_level(logging.DEBUG, "amp_fx.caching"):
        run = compiled(model, compiler="inductor", dtype="bfloat16")
        run(x)
    reason = "its memory is shared, mapped or NumPy's, where writes cannot be detected"
    assert f"not cached: w: {reason}" in caplog.text
    assert [value.weights for value in weight_cache.stats().values] == [("b",)]
    array[:] = 2
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    torch.testing.assert_close(run(x), expected.float(), rtol=0, atol=0)


@torch.no_grad()
def test_without_the_extension_nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "can_watch", lambda: False)
    [graph] = amp_fx.explain(Model(lambda m, x: x @ m.w @ m.b))(torch.randn(8, 8)).graphs
    assert set(dict(graph.uncached).values()) == {"writes to it cannot be detected"}


@torch.no_grad()
def test_the_table_lists_reasons() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8))
    text = " ".join(str(amp_fx.explain(model)(torch.randn(2, 8))).split())
    assert "not cached 1-2.weight, 1-2.bias: kernels read it as it is" in text
