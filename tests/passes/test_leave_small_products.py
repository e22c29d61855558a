"""leave_small_products: what ATen computes without oneDNN is not packed, and has eager bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx import weight_cache
from amp_fx.devices.low_dtypes import has_product_kernels
from tests import needs
from tests.weights.aot_graphs import text
from tests.weights.test_pack import integers, linear, packed

if TYPE_CHECKING:
    from torch import fx

pytestmark = [needs.FROZEN_GRAPHS, needs.PACKING]


def lines(gm: fx.GraphModule) -> str:
    return "\n".join(text(gm.graph))


@pytest.mark.parametrize(("rows", "is_small"), [(16, True), (17, False)])
def test_golden_graph(rows: int, *, is_small: bool) -> None:
    """ATen gives products of more than 16 x 16 x 16 multiplications to oneDNN."""
    x, weight = integers(rows, 16), integers(16, 16)
    gm, constants = packed(linear, weight, x)
    assert ("aten.mm" in lines(gm), "_linear_pointwise" in lines(gm)) == (is_small, not is_small)
    plan = constants.plan(gm, (), {})
    assert (len(plan.values), len(plan.constants)) == (is_small, not is_small)
    without_pass, _ = packed(linear, weight, x, skipped=["leave_small_products"])
    assert "_linear_pointwise" in lines(without_pass)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="ATen calls no MKL")  # type: ignore[no-untyped-call]
@pytest.mark.parametrize(
    ("rows", "columns", "is_small"), [(64, 256, True), (65, 256, False), (1, 257, False)]
)
def test_golden_graph_of_float32(rows: int, columns: int, *, is_small: bool) -> None:
    """MKL starts sooner than oneDNN, and reads a large weight more often."""

    def product(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, w)

    x, weight = integers(rows, 256), integers(columns, 256)
    gm, _ = packed(product, weight, x)
    assert ("aten.mm" in lines(gm), "_linear_pointwise" in lines(gm)) == (is_small, not is_small)
    without_pass, _ = packed(product, weight, x, skipped=["leave_small_products"])
    assert "_linear_pointwise" in lines(without_pass)


@torch.no_grad()
@pytest.mark.skipif(has_product_kernels(torch.float16) is not False, reason="has float16 units")
def test_what_is_widened_reads_a_cached_float32_weight() -> None:
    first = nn.Linear(16, 40)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(40, 24)).eval()
    options: Any = {"dtype": torch.float16, "fallback": False}
    program = torch.compile(model, backend="amp_fx", options=options)
    x = torch.randn(12, 16)
    for factor in (1.0, -0.5):
        first.weight.mul_(factor)
        with torch.autocast("cpu", torch.float16):
            torch.testing.assert_close(program(x), model(x), rtol=1e-3, atol=1e-3)
    values = weight_cache.stats().values
    assert {op for value in values for op in value.ops} <= {"convert_element_type", "permute"}
    assert {4 * 16 * 40, 4 * 40 * 24} <= {value.bytes for value in values}


def test_a_weight_of_a_small_and_a_large_product_is_cached_for_each() -> None:
    def both(w: torch.Tensor, few: torch.Tensor, many: torch.Tensor) -> Any:
        return linear(w, few), linear(w, many)

    gm, constants = packed(both, integers(16, 16), integers(2, 16), integers(64, 16))
    assert ("aten.mm" in lines(gm), "_linear_pointwise" in lines(gm)) == (True, True)
    plan = constants.plan(gm, (), {})
    assert (len(plan.values), len(plan.constants)) == (1, 1)


@torch.no_grad()
def test_a_weight_that_others_read_is_one_input() -> None:
    """A constant that a small product and other code read is cached once."""
    layer, x = nn.Linear(16, 16, bias=False).eval(), integers(16, 16)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x) + self.layer.weight.bfloat16().t()

    model = Both()
    program = torch.compile(model, backend="amp_fx", options={"fallback": False})
    for factor in (1.0, -3.0):
        layer.weight.copy_(factor * integers(16, 16))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(program(x), model(x))
    assert len(weight_cache.stats().values) == 1


@torch.no_grad()
def test_bits_are_those_of_eager_code_after_each_write() -> None:
    first = nn.Linear(16, 24)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(24, 3)).eval()
    program = torch.compile(model, backend="amp_fx", options={"fallback": False})
    for seed in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(program(x), model(x))
        first.weight.mul_(-1.5)
    ops = {op for value in weight_cache.stats().values for op in value.ops}
    assert ops <= {"convert_element_type", "permute"}
