"""Products of one input, which are joined into one: q, k and v, or gate and up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from amp_fx import weight_cache
from amp_fx.weights.cpu.few_rows import MAX_ROWS
from tests import needs
from tests.weights.keeping import Way
from tests.weights.test_few_rows import integers

pytestmark = [needs.FROZEN_GRAPHS, needs.PACKING]


class Several(nn.Module):
    """Linear layers that read one input, with weights by which all sums are exact."""

    def __init__(self, depth: int, columns: list[int], *, has_bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(depth, n, bias=has_bias) for n in columns)
        for i, parameter in enumerate(self.parameters()):
            parameter.data.copy_(integers(*parameter.shape, seed=i))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.sin().sign()
        results: list[torch.Tensor] = [layer(x).relu() for layer in self.layers]
        return results


def joined() -> list[weight_cache.KeptValue]:
    """Values of several weights: other values are of one."""
    return [value for value in weight_cache.stats().values if "cat" in value.ops]


def check(model: Several, results: list[torch.Tensor], x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    assert all(torch.equal(a, b.float()) for a, b in zip(results, expected, strict=True))


@settings(max_examples=4, deadline=None)
@given(
    rows=st.integers(MAX_ROWS + 1, MAX_ROWS + 20),
    depth=st.integers(16, 100),
    columns=st.lists(st.integers(16, 70), min_size=2, max_size=3),
    has_bias=st.booleans(),
    written=st.lists(st.integers(0, 1), max_size=2),
)
@torch.no_grad()
def test_exact_sums_have_the_bits_of_eager_autocast(
    *, rows: int, depth: int, columns: list[int], has_bias: bool, written: list[int]
) -> None:
    """Also after a write to one of the weights."""
    torch._dynamo.reset()
    weight_cache.clear()
    model, x = Several(depth, columns, has_bias=has_bias), torch.randn(rows, depth)
    compiled = torch.compile(model, backend="amp_fx")
    check(model, compiled(x), x)
    is_joined = not has_bias or len(columns) == 3  # inductor has a pattern for these
    assert bool(joined()) == is_joined
    for i in written:
        model.get_parameter(f"layers.{i}.weight").neg_()
        check(model, compiled(x), x)


@torch.no_grad()
def test_weights_that_come_from_one_weight() -> None:
    """The joined weight is larger than the weight from which its parts are computed."""

    class Derived(Several):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            x, w = x.sin().sign(), self.get_parameter("layers.0.weight")
            return [functional.linear(x, part) for part in (w.neg(), w.abs(), w.sign())]

    model, x = Derived(32, [32], has_bias=False), torch.randn(MAX_ROWS + 1, 32)
    program = torch.compile(model, backend="amp_fx")
    check(model, program(x), x)
    assert joined()
    model.get_parameter("layers.0.weight").add_(1)
    check(model, program(x), x)


@torch.no_grad()
def test_results_have_memory_of_their_own() -> None:
    layers, x = [nn.Linear(32, n, bias=False) for n in (16, 48)], torch.randn(2, 4, 32)

    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [self.layers[0](x), self.layers[1](x).transpose(0, 1)]

    model = Returned()
    with torch.autocast("cpu", torch.bfloat16):
        results, expected = torch.compile(model, backend="amp_fx")(x), model(x)
    assert joined()
    assert [r.stride() for r in results] == [e.stride() for e in expected]
    assert results[0].untyped_storage().data_ptr() != results[1].untyped_storage().data_ptr()


@torch.no_grad()
@pytest.mark.parametrize("numerics", ["strict", "eager"])
def test_bits_are_kept_under_other_numerics(numerics: str) -> None:
    model, x = Several(32, [32, 32], has_bias=False), torch.randn(8, 32)
    program = Way("", (("numerics", numerics),)).compile(model)
    check(model, program(x), x)  # type: ignore[arg-type]
    assert joined() == []
