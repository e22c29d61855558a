"""Products whose batch shares a matrix: one product, with the bits of the batched one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import amp_fx
from amp_fx.passes.flatten_products import FlattenProducts
from tests import needs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

aten = torch.ops.aten


def traced(program: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(program, tracing_mode="fake")(*inputs)


def shared_matrix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes what ``linear`` does for an input that is not contiguous."""
    return torch.bmm(x, weight.t().expand(x.size(0), -1, -1))


def num_batched(gm: fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=aten.bmm.default))


@needs.PACKING
@settings(max_examples=60, deadline=None)
@example(sizes=(16, 34, 40, 6), order=[0, 2, 1], seed=0, keeps_bits=True)  # differs on AMX
@given(
    sizes=st.tuples(*[st.integers(1, 40)] * 4),
    order=st.permutations([0, 1, 2]),
    seed=st.integers(0, 2**16),
    keeps_bits=st.booleans(),
)
def test_bits_of_the_batched_product(
    sizes: tuple[int, ...], order: list[int], seed: int, keeps_bits: bool
) -> None:
    """Compares bits for inputs of any layout."""
    batch, rows, terms, columns = sizes
    generator = torch.Generator().manual_seed(seed)
    shape = [(batch, rows, terms)[i] for i in order]
    stored = torch.randn(shape, generator=generator).bfloat16()
    x = stored.permute([order.index(i) for i in range(3)])
    weight = torch.randn(columns, terms, generator=generator).bfloat16()
    gm = traced(shared_matrix, x, weight)
    expected = gm(x, weight)

    result = FlattenProducts((torch.bfloat16,), keeps_bits).call(gm)
    num_flattened = result.counts["flattened_products"]
    assert num_flattened == (batch > 1 and not (keeps_bits and x.stride(2) != 1))
    gm.recompile()
    result = gm(x, weight)
    if keeps_bits:
        assert torch.equal(result, expected)
    torch.testing.assert_close(result, expected)
    assert (result.stride(), num_batched(gm)) == (expected.stride(), 1 - num_flattened)


@pytest.mark.parametrize(
    ("program", "inputs"),
    [
        pytest.param(shared_matrix, (torch.ones(2, 3, 4), torch.ones(5, 4)), id="float32"),
        pytest.param(
            shared_matrix, (torch.ones(2, 3, 4).half(), torch.ones(5, 4).half()), id="float16"
        ),
        pytest.param(
            torch.bmm,
            (torch.ones(2, 3, 4).bfloat16(), torch.ones(2, 4, 5).bfloat16()),
            id="a matrix for each",
        ),
        pytest.param(
            lambda x, w: torch.bmm(w.expand(2, -1, -1), x),
            (torch.ones(2, 3, 4).bfloat16(), torch.ones(5, 3).bfloat16()),
            id="the first matrix is shared",
        ),
    ],
)
def test_left_alone(program: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
    gm = traced(program, *inputs)
    assert not FlattenProducts((torch.bfloat16,)).call(gm).modified
    assert num_batched(gm) == 1


def attention() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    # With an even number of heads, evaluation calls one op for each layer.
    layer = torch.nn.TransformerEncoderLayer(48, 3, 64, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return encoder.eval(), torch.randn(3, 8, 48)


@pytest.mark.one_in(2)
@needs.CPP_COMPILER
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_weights_of_attention_are_packed(dtype: torch.dtype) -> None:
    """``MultiheadAttention`` with ``batch_first=True`` transposes its input."""
    model, x = attention()
    amp_fx.weight_cache.clear()
    options: dict[str, Any] = {"dtype": dtype}
    compiled = torch.compile(model, backend="amp_fx", options=options)
    compiled(x)
    packed = [v for v in amp_fx.weight_cache.stats().values if "in_proj_weight" in v.weights[0]]
    assert len(packed) == 2
    layouts = {"_reorder_linear_weight", "reshape"}  # oneDNN's, and blocks for few rows
    assert all(layouts.intersection(value.ops) for value in packed)


@needs.CPP_COMPILER
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
@torch.no_grad()
def test_transposed_inputs_have_the_bits_of_eager_autocast(is_trained: bool, bias: bool) -> None:
    """Eager code flattens if the weight requires gradients; without oneDNN's kernels, bits tell."""
    layer = torch.nn.Linear(12, 15, bias=bias).requires_grad_(is_trained)
    compiled = torch.compile(layer, backend="amp_fx", options={"numerics": "eager"})
    for seed in range(60):
        torch.manual_seed(seed)
        layer.weight.copy_(torch.randn(15, 12))
        x = torch.randn(25, 12, 18).transpose(1, 2)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(compiled(x), layer(x))
