"""Products of few rows, which inductor's C++ template computes from blocked weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch._inductor.utils import fresh_cache, run_and_get_code

from amp_fx import weight_cache
from amp_fx.passes.block_few_rows import BlockFewRows
from amp_fx.replaced import replaced
from amp_fx.torch_private.inductor import CppGemmTemplate, FewRowsKernel, few_rows_kernel
from amp_fx.weights.cpu import few_rows
from amp_fx.weights.cpu.few_rows import MAX_ROWS, MIN_COLUMNS, MIN_WEIGHTS, max_rows
from tests import needs
from tests.weights.keeping import Line, Way, batch

pytestmark = [
    needs.FROZEN_GRAPHS,
    pytest.mark.skipif(
        few_rows_kernel(torch.bfloat16, 1, 512, 512) is None,
        reason="the template has another kernel here",
    ),
]

aten = torch.ops.aten

SHARED = [HealthCheck.function_scoped_fixture]
"""All examples may share the fixture: it sets the same value."""


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "MIN_WEIGHTS", 0)


def integers(*sizes: int, seed: int) -> torch.Tensor:
    """Numbers whose sums of products are exact in bfloat16, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, sizes, generator=generator).float()


def blocked() -> list[weight_cache.KeptValue]:
    """Values that are reshaped, as no other value of a linear layer is."""
    return [v for v in weight_cache.stats().values if "reshape" in v.ops]


def block_few_rows(gm: fx.GraphModule) -> int:
    return BlockFewRows().call(gm).counts["blocked_products"]


def graph_of(rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> fx.GraphModule:
    """Returns a product with a constant, as constant folding leaves it."""
    gm = fx.GraphModule({"weight": weight}, fx.Graph())
    if bias is not None:
        gm.register_buffer("bias", bias)
    gm.register_buffer("weight", weight)
    x = gm.graph.placeholder("x")
    x.meta["val"] = weight.new_empty(rows, weight.size(0))
    args = [x, gm.graph.get_attr("weight")]
    args[1].meta["val"] = weight
    if bias is not None:
        args.insert(0, gm.graph.get_attr("bias"))
        args[0].meta["val"] = bias
    op = aten.mm.default if bias is None else aten.addmm.default
    product = gm.graph.call_function(op, tuple(args))
    product.meta["val"] = weight.new_empty(rows, weight.size(1))
    gm.graph.output(product)
    gm.recompile()
    return gm


KERNELS = [
    *(FewRowsKernel(block, uses_amx=False) for block in (16, 24, 48)),
    *(FewRowsKernel(block, uses_amx=True) for block in (16, 32, 48)),
]
"""Kernels of all processors; their blocks are the same everywhere."""


def is_few(kernel: FewRowsKernel | None, low: torch.dtype, rows: int, num_weights: int) -> bool:
    """Repeats the rule of rows."""
    if kernel is None:
        return False
    return 0 < rows <= max_rows(low, num_weights, uses_amx=kernel.uses_amx)


@settings(max_examples=100, deadline=None, suppress_health_check=SHARED)
@given(
    kernel=st.sampled_from(KERNELS),
    rows=st.one_of(st.integers(0, 12), st.integers(30, MAX_ROWS + 1)),
    depth=st.integers(1, 70),
    columns=st.integers(1, 200),
    is_transposed=st.booleans(),
    has_bias=st.booleans(),
)
def test_the_rewritten_graph_computes_the_same(
    *,
    kernel: FewRowsKernel,
    rows: int,
    depth: int,
    columns: int,
    is_transposed: bool,
    has_bias: bool,
) -> None:
    depth *= 1 + kernel.uses_amx
    weight = integers(depth, columns, seed=0).bfloat16()
    if is_transposed:
        weight = weight.t().contiguous().t()
    gm = graph_of(rows, weight, integers(columns, seed=1).bfloat16() if has_bias else None)
    x = integers(rows, depth, seed=2).bfloat16()
    expected = gm(x)
    is_rewritten = columns >= MIN_COLUMNS and is_few(kernel, torch.bfloat16, rows, weight.numel())
    with replaced((few_rows, "few_rows_kernel", lambda *_: kernel)):
        assert block_few_rows(gm) == is_rewritten
        assert block_few_rows(gm) == 0
    gm.recompile()
    assert torch.equal(gm(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
def test_generated_code_has_kernels_for_no_more_rows_than_there_are(rows: int) -> None:
    kernel = few_rows_kernel(torch.bfloat16, rows, 64, 64)
    if kernel is None or kernel.uses_amx:
        pytest.skip("AMX units multiply 16 rows at least")
    program = torch.compile(nn.Linear(64, 64), backend="amp_fx")
    with fresh_cache():
        _, (code,) = run_and_get_code(program, torch.randn(rows, 64))
    blocks = {int(size) for size in re.findall(r"micro_gemm_kernel<(\d+), \d+, accum", code)}
    assert blocks == set(range(1, rows + 1))


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_blocks_are_those_of_the_template(kernel: FewRowsKernel) -> None:
    """Relies on ``pack_vnni_weight``, by which the template packs weights itself."""
    from torch._inductor.codegen import cpp_micro_gemm

    columns, depth = 3 * kernel.block - 5, 14
    weight = torch.randn(columns, depth).bfloat16().t()
    gm = graph_of(1, weight, None)
    with replaced((few_rows, "few_rows_kernel", lambda *_: kernel)):
        assert block_few_rows(gm) == 1
    [product] = gm.graph.find_nodes(
        op="call_function", target=torch.ops.amp_fx.few_rows_product.default
    )
    gm.graph.output_node().args = (product.args[1],)
    gm.recompile()
    template: Any = CppGemmTemplate
    size, padded = template.get_padded_size(columns, kernel.block, depth, True)
    blocked = template.block_weight(weight, size, padded - columns)
    kind = "CppMicroGemmAMX" if kernel.uses_amx else "CppMicroGemmFP32Vec"
    dtypes = torch.bfloat16, torch.bfloat16, torch.float32, torch.float32
    micro_gemm = getattr(cpp_micro_gemm, kind)("", *dtypes, None, 1)
    expected = template.pack_vnni_weight(blocked, micro_gemm, size)
    result = gm(torch.empty(1, depth).bfloat16())
    assert torch.equal(result, expected)
    assert result.is_contiguous()


SIDE = int(MIN_WEIGHTS**0.5)


@pytest.mark.parametrize(
    ("weight", "is_blocked"),
    [
        (torch.ones(SIDE, SIDE).bfloat16(), True),
        (torch.ones(SIDE, SIDE - 1).bfloat16(), False),
        (torch.ones(SIDE, SIDE), False),
        (torch.ones(SIDE, SIDE, dtype=torch.bfloat16, device="meta"), False),
    ],
    ids=["large", "small", "float32", "another device"],
)
def test_weights_that_are_blocked(
    weight: torch.Tensor, is_blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "MIN_WEIGHTS", MIN_WEIGHTS)
    assert block_few_rows(graph_of(1, weight, None)) == is_blocked


def test_a_product_with_an_input_is_left_alone() -> None:
    gm = graph_of(2, torch.ones(8, 8).bfloat16(), None)
    [weight] = gm.graph.find_nodes(op="get_attr")
    [product] = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    product.replace_input_with(weight, product.all_input_nodes[0])
    assert block_few_rows(gm) == 0


@settings(max_examples=4, deadline=None, suppress_health_check=SHARED)
@given(
    rows=st.sampled_from([0, 1, 3, 8, 9, 31, 32, 33, 48, 128, 129]),
    depth=st.integers(40, 130),
    columns=st.integers(16, 130),
    has_bias=st.booleans(),
    is_low=st.booleans(),
    low=st.sampled_from([torch.bfloat16, torch.float16]),
    num_threads=st.sampled_from([1, 2]),
)
@torch.no_grad()
def test_exact_sums_have_the_bits_of_eager_autocast(
    *,
    rows: int,
    depth: int,
    columns: int,
    has_bias: bool,
    is_low: bool,
    low: torch.dtype,
    num_threads: int,
) -> None:
    """Multiplies by weights with padding, stored low or not; the template fuses an op."""
    dtype = low if is_low else torch.float32
    layer = nn.Linear(depth, columns, bias=has_bias, dtype=dtype)
    for parameter in layer.parameters():
        parameter.copy_(integers(*parameter.shape, seed=depth))
    model, x = nn.Sequential(layer, nn.ReLU()), integers(rows, depth, seed=columns).to(dtype)
    torch._dynamo.reset()
    weight_cache.clear()
    options: dict[str, Any] = {"dtype": low}
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        result = torch.compile(model, backend="amp_fx", options=options)(x)
        with torch.autocast("cpu", low):
            expected = model(x).to(dtype)
    finally:
        torch.set_num_threads(before)
    kernel = few_rows_kernel(low, rows, columns, depth) if rows else None
    assert bool(blocked()) == is_few(kernel, low, rows, columns * depth)
    assert torch.equal(result, expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("option", "value", "is_blocked"),
    [("numerics", "strict", False), ("numerics", "eager", False), ("max_autotune", True, True)],
)
def test_rule_of_other_options(option: str, value: object, is_blocked: bool) -> None:
    model = Line()
    way = Way(option, ((option, value),))
    way.warm(way.compile(model), batch())
    assert len(blocked()) == (len(model) if is_blocked else 0)
