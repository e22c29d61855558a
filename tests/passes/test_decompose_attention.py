"""Attention of one query: as near to the exact result as its rounding, and ATen's zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from amp_fx import stats
from amp_fx.passes.decompose_attention import ATTENTION, DecomposeAttention
from tests import needs

if TYPE_CHECKING:
    from torch import fx


def traced(*tensors: Any, **kwargs: Any) -> fx.GraphModule:
    """Traces attention as AOTAutograd does without gradients."""

    def attend(*args: Any) -> torch.Tensor:
        return scaled_dot_product_attention(*args, **kwargs)

    with torch.no_grad():
        return make_fx(attend, tracing_mode="fake")(*tensors)


def decomposed(*tensors: Any, **kwargs: Any) -> fx.GraphModule:
    """Traces attention and decomposes its kernel."""
    gm = traced(*tensors, **kwargs)
    assert DecomposeAttention().call(gm).counts["decomposed_attention"] == 1
    gm.recompile()
    return gm


def num_kernels(gm: fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=ATTENTION))


def stored(generator: torch.Generator, dtype: torch.dtype, *sizes: int, swapped: bool) -> Any:
    """Returns a random tensor; ``swapped`` stores heads behind positions, as projections do."""
    batch, heads, length, depth = sizes
    if swapped:
        sizes = (batch, length, heads, depth)
        return torch.randn(sizes, generator=generator).to(dtype).transpose(1, 2)
    return torch.randn(sizes, generator=generator).to(dtype)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 70), st.integers(8, 40)),
    group=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    kind=st.sampled_from(["none", "bool", "low", "row"]),
    scale=st.sampled_from([None, 0.3, 2.0]),
    swapped=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_result_is_the_rounded_exact_result(
    sizes: tuple[int, int, int, int],
    group: int,
    dtype: torch.dtype,
    kind: str,
    scale: Any,
    swapped: bool,
    seed: int,
) -> None:
    """Compares with an oracle that computes in float64 from the same inputs."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, length, depth = sizes
    query = stored(generator, dtype, batch, group * heads, 1, depth, swapped=swapped)
    key, value = (stored(generator, dtype, *sizes, swapped=swapped) for _ in range(2))
    masks = {
        "bool": torch.rand(batch, 1, 1, length, generator=generator) > 0.5,
        "low": torch.randn(1, group * heads, 1, length, generator=generator).to(dtype),
        "row": torch.randn(1, length, generator=generator).to(dtype),
    }
    inputs = [query, key, value, *([masks[kind]] if kind in masks else [])]
    gm = decomposed(*inputs, scale=scale, enable_gqa=True)
    result = gm(*inputs)

    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    wide[1:3] = (x.repeat_interleave(group, 1) for x in wide[1:3])
    exact = traced(*wide, scale=scale)(*wide)
    assert (result.dtype, result.shape, num_kernels(gm)) == (dtype, exact.shape, 0)
    rounding = torch.finfo(dtype).eps / 2
    sums = 2e-6 * float(value.abs().max())  # in float32
    smallest = torch.finfo(dtype).smallest_normal * rounding
    difference = (result.double() - exact).abs()
    assert (difference <= 1.001 * rounding * exact.abs() + sums + smallest).all()


def test_a_query_without_visible_keys_returns_zeros() -> None:
    query, key = torch.ones(1, 2, 1, 8).bfloat16(), torch.ones(1, 2, 3, 8).bfloat16()
    is_visible = torch.tensor([False, True])[None, :, None, None].expand(1, 2, 1, 3)
    inputs = query, key, key, is_visible
    assert torch.equal(decomposed(*inputs)(*inputs), scaled_dot_product_attention(*inputs))


def test_scores_that_overflow_below_return_zeros() -> None:
    query, key = (
        torch.full((1, 2, 1, 8), 1e20).bfloat16(),
        torch.full((1, 2, 3, 8), -1e20).bfloat16(),
    )
    inputs = query, key, torch.ones_like(key)
    assert torch.equal(decomposed(*inputs)(*inputs), scaled_dot_product_attention(*inputs))


@pytest.mark.parametrize("length", [5, 64])
def test_infinite_keys_and_values_are_not_lost(length: int) -> None:
    query, key, value = (torch.ones(1, 2, n, 8).bfloat16() for n in (1, length, length))
    key[0, 0, 3], value[0, 1, 2] = torch.nan, torch.inf
    result = decomposed(query, key, value)(query, key, value)
    assert result[0, 0].isnan().all()
    assert result[0, 1].isposinf().all()


def low(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes).bfloat16()


ONE, MANY = low(1, 2, 1, 8), low(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("inputs", "kwargs"),
    [
        pytest.param((MANY, MANY, MANY), {}, id="several queries"),
        pytest.param((ONE, MANY, MANY), {"is_causal": True}, id="causal"),
        pytest.param((ONE[..., :7], MANY[..., :7], MANY[..., :7]), {}, id="small heads"),
        pytest.param((ONE.float(), MANY.float(), MANY.float()), {}, id="float32"),
    ],
)
def test_left_alone(inputs: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
    gm = traced(*inputs, **kwargs)
    assert not DecomposeAttention().call(gm).modified
    assert num_kernels(gm) == 1


class Decoder(nn.Module):
    """One layer that attends to a cache, with two heads for each head of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, new = self.project(x).unflatten(-1, (8, 8)).transpose(1, 2).chunk(2, 1)
        cache = torch.cat([cache.to(new.dtype), new.unflatten(1, (2, 2)).transpose(0, 1)], -2)
        key, value = cache
        return scaled_dot_product_attention(query, key, value, enable_gqa=True), cache


@pytest.mark.one_in(2)
@needs.CPP_COMPILER
@torch.no_grad()
@pytest.mark.parametrize("numerics", [None, "eager"])
def test_decoding(numerics: str | None) -> None:
    """Lengths change from call to call; eager numerics keep ATen's kernel, and its bits."""
    torch.manual_seed(0)
    model, cache = Decoder().eval(), torch.randn(2, 2, 2, 40, 8)
    options: dict[str, Any] = {} if numerics is None else {"numerics": numerics}
    compiled = torch.compile(model, backend="amp_fx", options=options)
    before = stats.snapshot()["decomposed_attention"]
    for _ in range(4):
        x = torch.randn(2, 1, 32)
        with torch.autocast("cpu", torch.bfloat16):
            expected, _ = model(x, cache)
            result, following = compiled(x, cache)
        assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
        if numerics == "eager":
            assert torch.equal(result, expected)
        exact, _ = model.double()(x.double(), cache.double())
        model.float()
        torch.testing.assert_close(result.double(), exact, rtol=0.02, atol=0.02)
        cache = following
    assert (stats.snapshot()["decomposed_attention"] > before) == (numerics is None)


@needs.CPP_COMPILER
@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 2])
def test_inputs_are_computed_once(heads: int) -> None:
    """A sine of the query in the loop over the keys would be computed again for each key."""

    def attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query.sin(), key.cos(), key, enable_gqa=True)

    options: dict[str, Any] = {"dtype": torch.bfloat16}
    compiled = torch.compile(attend, backend="amp_fx", options=options)
    query, key = low(1, 2, 1, 16), low(1, heads, 40, 16)
    with fresh_cache():
        _, (code,) = run_and_get_code(compiled, query, key)
    sums = [loop for loop in code.split("for(") if "tmp_acc" in loop]
    assert "sin()" in code
    assert not any("sin()" in loop for loop in sums)
    assert heads == 2 or not any("cos()" in loop for loop in sums)


@needs.CPP_COMPILER
def test_gradients_keep_the_kernel() -> None:
    model, cache = Decoder(), torch.randn(2, 1, 2, 5, 8)
    before = stats.snapshot()["decomposed_attention"]
    result, _ = torch.compile(model, backend="amp_fx")(torch.randn(1, 1, 32), cache)
    result.sum().backward()
    assert stats.snapshot()["decomposed_attention"] == before
    assert model.project.weight.grad is not None
