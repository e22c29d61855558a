"""``numerics="invariant"``: rows of a batch against each row alone, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional

import amp_fx
from amp_fx import csrc
from amp_fx.backend import isolated_rows
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.devices.low_dtypes import has_product_kernels
from amp_fx.devices.rows import differing_rows
from amp_fx.errors import OptionError
from amp_fx.passes.isolate_rows import COMPOSITES, composites, isolate_rows
from tests.models.explained import GPT, Size

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(csrc.load_rows() is None, reason="needs a C++ compiler")


def compiled(program: Any, compiler: str = "aot_eager", numerics: str = "invariant") -> Any:
    return amp_fx.compile(program, numerics=numerics, options={"compiler": compiler})


class Router(nn.Module):
    """A float32 product in a region without autocast, as routers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            scores = self.gate(x.float()).softmax(-1)
        weights, experts = scores.topk(2)
        chosen = torch.zeros_like(scores).scatter(-1, experts, weights)
        return x * (chosen * torch.arange(4.0)).sum(-1, keepdim=True)


class RMSNorm(nn.Module):
    """The norm of Llama, of its own ops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    """Attention of five positions that a row is split into, with a mask of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(x.size(0), 2, 4, 6)
        mask = q.sum(-1)[:, :, None] > -1
        y = functional.scaled_dot_product_attention(q, q * 0.5, q + 1, mask)
        return y.reshape(x.shape)


class Strided(nn.Module):
    """Pointwise ops of a transposed tensor, and a linear layer of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.view(x.size(0), 6, 8).transpose(0, 1)
        return torch.sigmoid(self.layer(parts).float()).transpose(0, 1).reshape(x.shape)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(48, 48),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "norm": lambda: nn.LayerNorm(48),
    "rms": RMSNorm,
    "softmax": lambda: nn.Softmax(-1),
    "group": lambda: nn.Sequential(nn.Unflatten(-1, (6, 8)), nn.GroupNorm(3, 6), nn.Flatten()),
    "router": Router,
    "attention": Attention,
    "strided": Strided,
}


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(PARTS)), min_size=2, max_size=5), st.integers(2, 9))
def test_random_programs(names: list[str], size: int) -> None:
    torch.compiler.reset()
    torch.manual_seed(size)
    model = nn.Sequential(*(PARTS[name]() for name in names))
    x = torch.randn(size, 48)
    call = compiled(model)
    whole = call(x)
    with torch.no_grad():
        for i in range(size):
            assert torch.equal(call(x[i : i + 1]), whole[i : i + 1]), names
    assert whole.requires_grad or not list(model.parameters())


class Decoder(nn.Module):
    """The demo's model, which also takes a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(50, Size(width=48, depth=2, heads=3, context=24))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)  # type: ignore[no-any-return]


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def rows_that_differ(model: Decoder, numerics: str, compiler: str) -> int:
    torch.compiler.reset()
    tokens = torch.randint(50, (3, 17))
    call = compiled(model, compiler, numerics)
    trained = call(tokens)
    assert trained.requires_grad
    count = 0
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            for i in range(3):
                for length in (17, 6):
                    alone = call(tokens[i : i + 1, :length])[0]
                    count += int((alone != trained[i, :length]).sum())
    finally:
        torch.set_num_threads(1)
    trained.float().sum().backward()
    return count


@pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_the_model_of_the_demo_with_inductor() -> None:
    """Graphs without gradients have packed weights, where the processor has kernels for them."""
    model = decoder()
    assert rows_that_differ(model, "invariant", "inductor") == 0
    ops = {op for value in amp_fx.weight_cache.stats().values for op in value.ops}
    assert ("_reorder_linear_weight" in ops) is bool(has_product_kernels(torch.bfloat16))


@pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_packed_convolutions_were_not_measured() -> None:
    torch.manual_seed(0)
    parts = (nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 32))
    call = compiled(nn.Sequential(*parts).eval(), "inductor")
    x = torch.randn(5, 8, 8, 8)
    with torch.no_grad():
        whole = call(x)
        for i in range(5):
            assert torch.equal(call(x[i : i + 1]), whole[i : i + 1])
    ops = {op for value in amp_fx.weight_cache.stats().values for op in value.ops}
    assert not [op for op in ops if "_reorder_" in op]


@pytest.mark.slow
def test_the_model_of_the_demo_and_a_control() -> None:
    assert rows_that_differ(decoder(), "invariant", "aot_eager") == 0
    assert rows_that_differ(decoder(), "eager", "aot_eager") > 0


def error(model: nn.Module, *inputs: torch.Tensor) -> str:
    torch.compiler.reset()
    with pytest.raises(BackendCompilerFailed) as raised:
        compiled(model)(*inputs)
    return str(raised.value)


class Capacity(nn.Module):
    """Routing that drops the tokens beyond the capacity of an expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = functional.one_hot(x[:, :4].argmax(-1), 4)
        position = chosen.cumsum(0) * chosen
        result: torch.Tensor = x * (position.amax(-1, keepdim=True) <= 2)
        return result


class DropoutAttention(nn.Module):
    """Attention with dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(-1, 2, 4, 6)
        y: torch.Tensor = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        return y


class Unknown(nn.Module):
    """An op of which nothing is known."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = torch.linalg.svdvals(x)
        return values


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Dropout(0.1), "native_dropout.default is not batch-invariant: it draws random"),
        (nn.BatchNorm1d(48), "statistics are those of the whole batch"),
        (DropoutAttention(), "scaled_dot_product_attention with dropout"),
        (Capacity(), "a row depends on other rows through the capacity of the expert"),
        (Unknown(), "aten._linalg_svd.default is not batch-invariant: it is not among"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_mixes_rows_is_refused(model: nn.Module, message: str) -> None:
    assert message in error(model, torch.randn(8, 48, requires_grad=True))


def test_in_evaluation_mode_the_same_models_are_taken() -> None:
    model = nn.Sequential(nn.Linear(48, 48), nn.Dropout(0.1), nn.BatchNorm1d(48)).eval()
    x = torch.randn(4, 48)
    call = compiled(model)
    assert torch.equal(call(x)[2:3], call(x[2:3]))


@pytest.mark.parametrize(
    "given_options", [{"compiler": "eager"}, {"fallback": True}, {"range_guard": True}]
)
def test_options_that_break_the_promise_are_refused(given_options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="numerics='invariant'"):
        amp_fx.compile(nn.Linear(2, 2), numerics="invariant", options=given_options)


class Centered(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y - y.mean(0)


def test_verify_names_the_first_op_whose_rows_differ() -> None:
    options = {"numerics": "invariant", "compiler": "aot_eager"}
    report = amp_fx.verify(Centered(), invariant=True, options=options)(torch.randn(3, 48))
    assert not report.is_equal
    assert report.first is not None
    assert report.first.op == "sub"
    assert "y - y.mean(0)" in report.first.source
    assert "each row alone" in str(report)


def test_verify_of_a_float32_product() -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 48)
    plain = amp_fx.verify(Router(), invariant=True, options={"compiler": "aot_eager"})(x)
    assert plain.first is not None
    assert plain.first.op == "addmm"
    options = {"numerics": "invariant", "compiler": "aot_eager"}
    assert amp_fx.verify(Router(), invariant=True, options=options)(x).is_equal


def test_weights_are_known_and_their_measured_kernels_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relies on ``static_input_indices`` of AOTAutograd naming parameters."""
    graphs = []

    def isolate(graph: Any, weights: list[int]) -> Any:
        counts = isolate_rows(graph, weights)
        graphs.append((weights, [str(node.target) for node in graph.nodes]))
        return counts

    monkeypatch.setattr(isolated_rows, "isolate_rows", isolate)
    model = nn.Sequential(nn.Linear(48, 48), nn.Softmax(-1))
    x = torch.randn(4, 48)
    trained = compiled(model)(x)
    with torch.no_grad():
        assert torch.equal(compiled(model)(x), trained)
    assert [len(weights) for weights, _ in graphs] == [2, 2]
    for _, targets in graphs:
        assert ("aten.addmm.default" in targets) is (not differing_rows(torch.bfloat16, 48, 48))
        assert "amp_fx.ordered_softmax.default" in targets


def test_composite_ops_are_put_back() -> None:
    """Relies on ``OpOverload.py_kernels``."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    before = {op: op.py_kernels.get(key) for op in COMPOSITES}
    with composites():
        assert all(op.py_kernels[key] is kernel for op, kernel in COMPOSITES.items())
    assert {op: op.py_kernels.get(key) for op in COMPOSITES} == before
