"""fallback: what fails to compile runs op by op, says so, and stops nothing else."""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._inductor import config, lowering

from amp_fx.backend import fallback
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.passes.fold_casts import FoldCasts
from amp_fx.passes.insert_casts import InsertCasts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

bf16, f32 = torch.bfloat16, torch.float32

needs_cpp = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")
pytestmark = [
    pytest.mark.falls_back,
    # torch's own, where a graph starts with an activation.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@torch.library.custom_op("amp_fx_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda _, grad: grad * 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = twice(self.inner[0](x))
        return y.relu()


class Model(nn.Module):
    """Two graphs, the first of which has the custom op."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        torch._dynamo.graph_break()
        result: torch.Tensor = self.head(y)
        return result


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fallback, "_seen", set())
    # Once inductor has fallen back for an op it keeps that for its lowering.
    lowering.lowerings.pop(torch.ops.amp_fx_tests.twice.default, None)
    with config.patch(fx_graph_cache=False):
        yield


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(3, 4, generator=rng)


def train(program: Callable[..., Any], module: nn.Module, x: torch.Tensor, dtype: Any) -> Any:
    module.zero_grad()
    with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        result = program(x)
    torch.autograd.backward(result.float().sum())
    return result.detach(), [p.grad for p in module.parameters()]


def compile_model(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="amp_fx", options=options)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "amp_fx.fallback"]


class Inject:
    """A hook of inductor's config that fails on the given calls."""

    def __init__(self, *calls: int) -> None:
        self.calls = calls
        self.num_calls = 0

    def __call__(self, _: Any) -> None:
        self.num_calls += 1
        if self.num_calls in self.calls:
            raise ValueError(f"injected into call {self.num_calls}\nand more")

    def uuid(self) -> str:
        return str(id(self))


def check_trains(
    model: Model, x: torch.Tensor, way: str, *, is_updated: bool = False, **options: Any
) -> None:
    """Twice the step of eager autocast.

    Args:
        model: What is trained.
        x: Its input.
        way: ``"bare"``, or ``"ambient"`` for a region around the call.
        is_updated: Whether weights are written after each step, as by an optimizer. If they are
            not, the second step compiles each graph once more, to keep casts of weights.
        **options: Of the backend.
    """
    other = copy.deepcopy(model)
    program = compile_model(model, **options)
    dtype = bf16 if way == "ambient" else None
    for _ in range(2):
        actual = train(program, model, x, dtype)
        expected = train(other, other, x, bf16)
        assert actual[0].dtype == (bf16 if way == "ambient" else f32)
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05, check_dtype=False)
        if is_updated:
            with torch.no_grad():
                torch._foreach_mul_([*model.parameters(), *other.parameters()], 0.5)


@needs_cpp
@pytest.mark.parametrize("way", ["bare", "ambient"])
def test_op_without_a_lowering(
    model: Model, x: torch.Tensor, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    with config.patch(implicit_fallbacks=False):
        check_trains(model, x, way)
    [message] = warnings_in(caplog)
    for part in (
        "op by op, with its casts",
        "could not be compiled with 'inductor': ",
        "missing lowering, target: amp_fx_tests.twice.default",
        f"in block ({__file__}:",
        'TORCH_LOGS="+amp_fx"',
        '{"fallback": False}',
    ):
        assert part in message


@needs_cpp
def test_the_next_graph_compiles(
    model: Model, x: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    inject = Inject(1)
    with config.patch(post_grad_custom_pre_pass=inject):
        check_trains(model, x, "bare", is_updated=True)
    assert inject.num_calls == 3  # the failed forward, and forward and backward of the second
    [message] = warnings_in(caplog)
    assert "ValueError: injected into call 1; in the graph that begins at" in message
    assert "block.inner.0" in message


@needs_cpp
def test_backward_that_fails(
    model: Model, x: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    with config.patch(post_grad_custom_pre_pass=Inject(3, 4)):
        check_trains(model, x, "ambient")
    messages = warnings_in(caplog)
    assert len(messages) == 2
    assert all("a backward graph runs op by op" in message for message in messages)


@needs_cpp
@pytest.mark.parametrize("call", [1, 3])
def test_without_fallback_it_raises(model: Model, x: torch.Tensor, call: int) -> None:
    with (
        config.patch(post_grad_custom_pre_pass=Inject(call)),
        pytest.raises(Exception, match=f"injected into call {call}"),
    ):
        train(compile_model(model, fallback=False), model, x, None)


@needs_cpp
def test_one_warning_per_cause(
    model: Model, x: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    with config.patch(implicit_fallbacks=False):
        for _ in range(2):
            compile_model(model)(x)
            torch._dynamo.reset()
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("way", ["bare", "ambient"])
@pytest.mark.parametrize("broken_pass", [InsertCasts, FoldCasts])
def test_pass_that_raises(
    model: Model,
    x: torch.Tensor,
    broken_pass: type,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original = broken_pass.call  # type: ignore[attr-defined]

    def call(self: Any, gm: torch.fx.GraphModule) -> Any:
        [*nodes] = [n for n in gm.graph.nodes if n.target is torch.ops.amp_fx_tests.twice.default]
        if nodes:
            visit(nodes[0])
        return original(self, gm)

    def visit(node: torch.fx.Node) -> None:
        raise KeyError(f"of {node.name}")

    monkeypatch.setattr(broken_pass, "call", call)
    with caplog.at_level(logging.DEBUG, "amp_fx"):
        check_trains(model, x, way, compiler="eager")
    [message, *_] = warnings_in(caplog)
    for part in (
        "under native autocast",
        f"pass {broken_pass.name!r} failed after",  # type: ignore[attr-defined]
        "KeyError",
        f"at amp_fx_tests.twice in block ({__file__}:",
        "fallback",
    ):
        assert part in message
    assert any(r.exc_info and "falling back" in r.getMessage() for r in caplog.records)


def narrow(x: torch.Tensor) -> torch.Tensor:
    return x @ x


class Narrow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x


def messages_past_the_limit(
    caplog: pytest.LogCaptureFixture, program: Any, dtypes: list[torch.dtype], **settings: Any
) -> list[str]:
    """Calls a program with five shapes, where Dynamo may compile two; returns amp_fx's warnings."""
    torch._dynamo.reset()
    options: Any = {"compiler": "eager", "output_dtype": "autocast"}
    settings |= {"options": options, "dynamic": False}
    compiled: Any = torch.compile(program, backend="amp_fx", **settings)
    caplog.clear()
    with torch._dynamo.config.patch(recompile_limit=2), caplog.at_level(logging.WARNING, "amp_fx"):
        results = [compiled(torch.ones(size, size)).dtype for size in range(1, 6)]
    assert results == dtypes
    return [r.getMessage() for r in caplog.records if r.name.startswith("amp_fx")]


@pytest.mark.parametrize(
    ("program", "name"),
    [(narrow, "'narrow' ("), (Narrow(), "Narrow: 'forward' ("), (nn.ReLU(), "ReLU: ")],
    ids=["function", "module", "module of torch.nn"],
)
def test_one_warning_names_what_runs_eagerly_past_the_recompile_limit(
    program: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    dtypes = [f32] * 5 if isinstance(program, nn.ReLU) else [bf16, bf16, f32, f32, f32]
    [message] = messages_past_the_limit(caplog, program, dtypes)
    assert message.startswith(name)
    assert "in full precision (float32)" in message
    assert "recompile_limit (2)" in message


def test_no_warning_past_the_recompile_limit_in_a_region(caplog: pytest.LogCaptureFixture) -> None:
    with torch.autocast("cpu", bf16):
        assert not messages_past_the_limit(caplog, narrow, [bf16] * 5)


def test_no_warning_past_the_recompile_limit_if_dynamo_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(Exception, match="fullgraph=True"):
        messages_past_the_limit(caplog, narrow, [], fullgraph=True)
    assert not [r for r in caplog.records if r.name.startswith("amp_fx")]
