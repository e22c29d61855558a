"""zentorch's kernel for attention; a stand-in with its schema runs where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx import stats
from amp_fx.backend.after_autograd import AfterAutograd
from amp_fx.passes import call_zentorch as calling
from amp_fx.passes.call_zentorch import call_zentorch
from amp_fx.passes.open_attention import ATTENTION
from tests import needs
from tests.passes.test_open_attention import low, traced

if TYPE_CHECKING:
    from torch import fx

IS_INSTALLED = importlib.util.find_spec("zentorch") is not None
SCHEMA = (
    "zentorch_sdpa(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
    "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None, "
    'str zentorch_op_name="zentorch::zentorch_sdpa") -> (Tensor, Tensor)'
)


@pytest.fixture(scope="module")
def stand_in() -> Any:
    """Defines the op with ATen's kernel, which refuses what zentorch refuses."""
    if IS_INSTALLED:
        return importlib.import_module("zentorch")
    library = torch.library.Library("zentorch", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(SCHEMA)  # type: ignore[no-untyped-call]

    def attend(*args: Any, **kwargs: Any) -> Any:
        assert all(tensor.stride(-1) == 1 for tensor in args[:3])
        return ATTENTION(*args, **kwargs)

    library.impl("zentorch_sdpa", attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    return types.SimpleNamespace(__version__="stand-in", library=library)


@pytest.fixture
def zentorch(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zentorch", stand_in)
    monkeypatch.setattr(calling, "bfloat16_units", lambda: ["avx512_bf16"])


def num_calls(gm: fx.GraphModule) -> int:
    op = torch.ops.zentorch.zentorch_sdpa.default
    return len(gm.graph.find_nodes(op="call_function", target=op))


@pytest.mark.usefixtures("zentorch")
@pytest.mark.parametrize("is_causal", [False, True])
def test_several_queries(is_causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, n, 16).bfloat16() for n in (33, 50, 50))
    gm = traced(query, key, value, is_causal=is_causal, scale=0.5)
    expected = gm(query, key, value)
    assert (call_zentorch(gm.graph), num_calls(gm)) == (1, 1)
    gm.recompile()
    result = gm(query, key, value)
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)


QUERIES = low(1, 2, 4, 8)


@pytest.mark.usefixtures("zentorch")
@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param((QUERIES.half(),) * 3, id="float16"),
        pytest.param((QUERIES.float(),) * 3, id="float32"),
        pytest.param((QUERIES, low(1, 2, 8, 4).mT, QUERIES), id="columns"),
    ],
)
def test_left_alone(inputs: tuple[torch.Tensor, ...]) -> None:
    gm = make_fx(lambda *tensors: ATTENTION(*tensors)[0], tracing_mode="fake")(*inputs)
    assert (call_zentorch(gm.graph), num_calls(gm)) == (0, 0)


@pytest.mark.usefixtures("stand_in")
def test_only_if_the_program_imported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "zentorch", raising=False)
    monkeypatch.setattr(calling, "bfloat16_units", lambda: ["avx512_bf16"])
    gm = traced(QUERIES, QUERIES, QUERIES)
    assert call_zentorch(gm.graph) == 0


def test_compiled_code_is_not_shared_with_programs_without_it(
    monkeypatch: pytest.MonkeyPatch, stand_in: Any
) -> None:
    monkeypatch.setattr(calling, "bfloat16_units", lambda: ["avx512_bf16"])
    monkeypatch.delitem(sys.modules, "zentorch", raising=False)
    keys = [AfterAutograd(chooses_kernels=True).uuid()]
    monkeypatch.setitem(sys.modules, "zentorch", stand_in)
    keys.append(AfterAutograd(chooses_kernels=True).uuid())
    assert keys[0] != keys[1]


class Attention(nn.Module):
    """Keys are columns of a product, so that inductor may lay them out either way."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        key = torch.nn.functional.gelu(key.mT).mT
        return torch.nn.functional.scaled_dot_product_attention(query, key.contiguous(), value)


@pytest.mark.usefixtures("zentorch")
@needs.CPP_COMPILER
@torch.no_grad()
@pytest.mark.parametrize("numerics", [None, "eager"])
def test_compiled(numerics: str | None) -> None:
    torch.manual_seed(0)
    model = Attention().eval()
    options: dict[str, Any] = {} if numerics is None else {"numerics": numerics}
    compiled = torch.compile(model, backend="amp_fx", options=options)
    before = stats.snapshot()["zentorch_attention"]
    for length in (20, 33, 40):
        x = torch.randn(2, length, 32)
        with torch.autocast("cpu", torch.bfloat16):
            expected, result = model(x), compiled(x)
        assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)
        assert numerics is None or torch.equal(result, expected)
    assert (stats.snapshot()["zentorch_attention"] > before) == (numerics is None)
