"""The ordered kernels, against float64 and against themselves for each row alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_fx import csrc
from amp_fx.passes.isolate_rows import attention
from amp_fx.tables.rows import EXACT

ops: Any = torch.ops.amp_fx
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.skipif(csrc.load_rows() is None, reason="needs a C++ compiler")


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = ops.ordered_product(left, right, None, 0.0, 1.0)
    return result


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.tuples(*[st.integers(1, 70)] * 3),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(1, 2),
)
def test_a_product_is_that_of_each_row_and_ignores_masked_terms(
    dtype: torch.dtype, sizes: tuple[int, int, int], before: int, after: int, threads: int
) -> None:
    rows, depth, columns = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    left = torch.randn(3, rows, depth, generator=generator).to(dtype)
    right = torch.randn(3, depth, columns, generator=generator).to(dtype)
    expected = product(left, right)
    exact = left.double() @ right.double()
    tolerance = 1e-5 if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(expected.double(), exact, rtol=tolerance, atol=1e-5 * depth)
    torch.set_num_threads(threads)
    try:
        row, column = rows // 2, columns // 2
        alone = product(left[1:2, row : row + 1], right[1:2, :, column : column + 1])
        assert torch.equal(alone[0, 0, 0], expected[1, row, column])
        assert torch.equal(product(left[2], right[2].t().contiguous().t()), expected[2])
        padded = torch.nn.functional.pad(left, (before, after))
        noise = [torch.randn(3, n, columns, generator=generator).to(dtype) for n in (before, after)]
        assert torch.equal(product(padded, torch.cat([noise[0], right, noise[1]], 1)), expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_times_zero_is_not_read(dtype: torch.dtype, alpha: float) -> None:
    left, right = torch.randn(5, 7).to(dtype), torch.randn(7, 40).to(dtype)
    bias = torch.full((5, 40), math.nan, dtype=dtype)
    result = ops.ordered_product(left, right, bias, 0.0, alpha)
    expected = torch.addmm(bias.double(), left.double(), right.double(), beta=0, alpha=alpha)
    tolerance = 1e-5 if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=1e-5)
    assert torch.equal(result, ops.ordered_product(left, right, None, 1.0, alpha))


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_softmax_ignores_masked_elements_wherever_they_are(
    dtype: torch.dtype, is_log: bool
) -> None:
    x = (torch.randn(9, 77) * 5).to(dtype)
    result = ops.ordered_softmax(x, -1, torch.float32, is_log)
    wide = x.double()
    exact = wide.log_softmax(-1) if is_log else wide.softmax(-1)
    torch.testing.assert_close(result.double(), exact, rtol=2e-6, atol=2e-6)
    for before in (1, 7, 16):
        padded = torch.nn.functional.pad(x, (before, 5), value=-math.inf)
        found = ops.ordered_softmax(padded, -1, torch.float32, is_log)
        assert torch.equal(found[:, before:-5], result)
    assert torch.equal(ops.ordered_softmax(x.t(), 0, torch.float32, is_log), result.t())
    assert torch.equal(ops.ordered_softmax(x[4:5], -1, torch.float32, is_log)[0], result[4])


@pytest.mark.parametrize("dims", [[-1], [1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_sum_has_the_shape_and_the_value_of_atens(dims: list[int], keeps: bool) -> None:
    x = torch.randn(5, 7, 9)
    found = ops.ordered_sum(x, dims, keeps, torch.float32, True)
    exact = x.double().mean(dims, keeps)
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact)


def test_a_sum_does_not_depend_on_threads_or_zeros() -> None:
    x = torch.randn(1, 40000)
    expected = ops.ordered_sum(x, [1], False, torch.float32, False)
    torch.set_num_threads(2)
    try:
        padded = torch.nn.functional.pad(x, (13, 4))
        assert torch.equal(ops.ordered_sum(padded, [1], False, torch.float32, False), expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["gelu", "silu", "sigmoid", "exp", "tanh", "softplus", "rsqrt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_element_of_a_pointwise_op_does_not_depend_on_its_place(
    name: str, dtype: torch.dtype
) -> None:
    assert name not in EXACT
    own = getattr(torch.ops.amp_fx_rows, name).default
    aten = getattr(torch.ops.aten, name).default
    x = torch.randn(40, 64 * 7).to(dtype).abs()
    expected = aten(x)
    torch.set_num_threads(2)
    try:
        assert torch.equal(own(x), expected)
        assert torch.equal(own(x.t()), expected.t())
        for size in (1, 7, 33):
            assert torch.equal(own(x[:, size : 2 * size]), expected[:, size : 2 * size])
    finally:
        torch.set_num_threads(1)


def test_atens_pointwise_ops_do_depend_on_it() -> None:
    """The reason for ``amp_fx_rows``; if it fails, the ops can go."""
    x = torch.randn(40, 64 * 7)
    assert not torch.equal(torch.sigmoid(x)[:, 1:8], torch.sigmoid(x[:, 1:8]))


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_that_of_torch(is_causal: bool) -> None:
    query, key, value = (torch.randn(2, n, 7, 16) for n in (4, 2, 2))
    options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True}
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(attention(query, key, value, **options), expected)
    mask = torch.rand(2, 1, 7, 7) > 0.3
    mask[0, 0, 0] = False
    found = attention(query, key, value, mask, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, enable_gqa=True
    )
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[0, :, 0], torch.zeros(4, 16))
