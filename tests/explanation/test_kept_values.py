"""The values that an explanation says are cached are those that a compiled model then caches."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import amp_fx
from amp_fx import weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.weights.inputs import FOREIGN
from tests import needs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from amp_fx.explanation.explanation import Explanation

# The same on any CPU; where products are in float32, packed weights are larger than explained.
pytestmark = [
    pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler"),
    pytest.mark.usefixtures("_low_products"),
]

BFLOAT16 = torch.bfloat16


def tied() -> nn.Module:
    tokens, head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
    head.weight = tokens.weight
    return nn.Sequential(tokens, head)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


def parametrized() -> nn.Module:
    model: nn.Module = parametrizations.weight_norm(nn.Linear(16, 16))
    return model


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, dict[str, Any]]] = {
    "mlp": (mlp, torch.randn(16, 16), {}),
    "small products": (mlp, torch.randn(4, 16), {}),
    "convolution": (convolution, torch.randn(2, 3, 8, 8), {}),
    "convolution with its batch norm": (
        convolution,
        torch.randn(2, 3, 8, 8),
        {"fold_batch_norm": True},
    ),
    "parametrized": (parametrized, torch.randn(4, 16), {}),
    "tied": (tied, torch.arange(8), {}),
    "cell": (lambda: nn.LSTMCell(16, 16), torch.randn(4, 16), {}),
}


def explained(model: nn.Module, x: torch.Tensor, options: Mapping[str, Any]) -> Explanation:
    found: Explanation = amp_fx.explain(model, dtype=BFLOAT16, options=options)(x)
    return found


@pytest.mark.one_in(3)
@needs.FROZEN_GRAPHS
@pytest.mark.parametrize(
    ("name", "has_gradients", "is_frozen"),
    [
        *((name, False, True) for name in PROGRAMS),
        *(
            (name, grad, False)
            for name in PROGRAMS
            if not PROGRAMS[name][2]
            for grad in (True, False)
        ),
    ],
)
def test_what_is_kept_is_explained(name: str, has_gradients: bool, is_frozen: bool) -> None:
    make, x, options = PROGRAMS[name]
    if not is_frozen:
        options = {"freezing": False, "weight_cache": "training"}
    torch.manual_seed(0)
    model = make().eval()
    settings: dict[str, Any] = {**options, "dtype": BFLOAT16}
    compiled = torch.compile(model, backend="amp_fx", options=settings)
    weight_cache.clear()
    with torch.set_grad_enabled(has_gradients):
        explanation = explained(model, x, options)
        compiled(x)
    kept = {(value.weights, value.ops): value.bytes for value in weight_cache.stats().values}
    told: Counter[Any] = Counter()  # tensors that are computed together are told one by one
    for value in explanation.graphs[0].cached_values:
        told[value.weights, value.ops] += value.num_bytes
    assert kept
    assert told == kept
    assert explanation.totals.value_bytes == sum(kept.values())


@pytest.mark.parametrize(
    ("device_type", "has_gradients", "options"),
    [
        ("cpu", True, {"weight_cache": False}),
        ("cpu", False, {"weight_cache": False}),
        ("cpu", True, {}),
        ("cuda", True, {}),
    ],
)
def test_nothing_is_kept_without_a_cache_or_where_gradients_flow(
    device_type: str, has_gradients: bool, options: dict[str, Any]
) -> None:
    explain = amp_fx.explain(mlp(), dtype=BFLOAT16, device_type=device_type, options=options)
    with torch.set_grad_enabled(has_gradients):
        explanation = explain(torch.randn(4, 16))
    assert not explanation.graphs[0].cached_values
    assert explanation.totals.casts_cached == 0


CASTS_OF_MLP = {("0.weight", 1024), ("0.bias", 64), ("2.weight", 1024), ("2.bias", 32)}
"""Weights whose casts are cached, and the bytes of the results."""


@needs.HOOK
@pytest.mark.parametrize(
    ("has_gradients", "options"),
    [
        (False, {}),
        (False, {"freezing": True}),
        (True, {"weight_cache": "training"}),
        (True, {"weight_cache": "training", "freezing": True}),
    ],
)
def test_casts_are_kept_of_an_accelerator_that_is_not_there(
    has_gradients: bool, options: Mapping[str, Any]
) -> None:
    with torch.set_grad_enabled(has_gradients):
        explain = amp_fx.explain(mlp(), dtype=BFLOAT16, device_type="cuda", options=options)
        explanation = explain(torch.randn(4, 16))
    values = explanation.graphs[0].cached_values
    assert {(*value.weights, value.num_bytes) for value in values} == CASTS_OF_MLP
    assert all(len(value.ops) == 1 for value in values)
    assert explanation.totals.casts_cached == len(CASTS_OF_MLP)


@needs.FROZEN_GRAPHS
@needs.PACKING
@pytest.mark.parametrize("options", [{}, {"freezing": True}])
def test_weights_stored_low_are_kept_only_where_that_was_asked_for(
    options: Mapping[str, Any],
) -> None:
    model, x = mlp().eval(), torch.randn(16, 16)
    amp_fx.store_low(model, dtype="bfloat16")(x)
    compiled = amp_fx.compile(model, dtype=BFLOAT16, options=options)
    weight_cache.clear()
    with torch.no_grad():
        values = explained(compiled, x, options).graphs[0].cached_values
        compiled(x)
    assert bool(values) == bool(options)
    assert len(values) == len(weight_cache.stats().values)


@needs.HOOK
@pytest.mark.parametrize("freezing", [True, False])
@pytest.mark.parametrize("kind", ["numpy", "mmap", "shared"])
def test_weights_in_foreign_memory_are_told_with_the_reason(
    kind: str, freezing: bool, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    last: Any = model[1]
    weight = last.weight.detach()
    if kind == "numpy":
        weight = torch.from_numpy(weight.numpy().copy())
    elif kind == "mmap":
        torch.save(weight, tmp_path / "weight")
        weight = torch.load(tmp_path / "weight", mmap=True)
    else:
        weight = weight.clone().share_memory_()
    last.weight = nn.Parameter(weight)
    x, options = torch.randn(16, 8), {"freezing": freezing}
    compiled = amp_fx.compile(model, dtype=BFLOAT16, options=options)
    weight_cache.clear()
    with torch.no_grad():
        [graph] = explained(compiled, x, options).graphs
        compiled(x)
    kept = {name for value in weight_cache.stats().values for name in value.weights}
    assert {name for value in graph.cached_values for name in value.weights} == kept
    assert "1.weight" not in kept
    assert dict(graph.uncached)["1.weight"] == FOREIGN
    states = {cast.weight: cast.state for cast in graph.casts if cast.weight}
    assert states["1.weight"] == "inserted"
    assert states["0.weight"] == "cached"
