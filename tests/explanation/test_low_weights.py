"""Weights that are only read low, and how results change if they are stored low."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx import CastPolicy
from tests.composed import Composed
from tests.models.explained import CASES, mlp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def linears(function: Callable[..., Any], *names: str) -> Any:
    return Composed(function, **{name: nn.Linear(8, 8) for name in names})


def linear() -> Any:
    return linears(lambda m, x: m.linear(x), "linear")


def views() -> Any:
    """A weight whose halves are cast apart, one that is cast whole, one that is written."""

    def forward(model: Any, x: torch.Tensor) -> Any:
        model.count.view(-1).add_(1)
        upper, lower = model.halves.chunk(2)
        return x @ upper.t() @ lower + x @ model.whole + x @ model.count

    halves, whole = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
    return Composed(forward, halves=halves, whole=whole, count=nn.Buffer(torch.zeros(8, 8)))


def repeated() -> Any:
    """A checkpointed and a plain use of one weight, next to a weight that an op takes as it is."""
    model = linears(
        lambda m, x: m.inner(checkpoint(m.inner, x, use_reentrant=False)) * m.scale, "inner"
    )
    model.scale = nn.Parameter(torch.randn(8))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    **CASES,
    "attention of torch": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0),
        (torch.randn(2, 4, 16),),
    ),
    "views": (views, (torch.randn(2, 8),)),
    "repeated": (repeated, (torch.randn(2, 8),)),
}


def run(model: nn.Module, args: Sequence[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the output and the gradients, in float32, of eager autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        out: torch.Tensor = model(*args)
    out.float().square().sum().backward()  # type: ignore[no-untyped-call]
    named = model.named_parameters()
    return out.detach(), {name: p.grad.float() for name, p in named if p.grad is not None}


def store(model: nn.Module, low: dict[str, torch.dtype]) -> nn.Module:
    """Returns a copy of a model with some of its weights stored low."""
    model = copy.deepcopy(model)
    for name, dtype in low.items():
        tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
        tensor.data = tensor.data.to(dtype)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_no_bit_of_a_training_step_changes_if_they_are_stored_low(name: str) -> None:
    make, args = MODELS[name]
    model = make()
    low = amp_fx.explain(model)(*args).low_weights()
    assert low
    stored = store(model, low)
    torch.testing.assert_close(run(stored, args), run(model, args), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"weight_cache": False}])
def test_each_other_weight_is_read_as_it_is(options: dict[str, Any]) -> None:
    explanation = amp_fx.explain(views(), options=options)(torch.randn(2, 8))
    assert explanation.low_weights() == {"whole": torch.bfloat16}
    [graph] = explanation.graphs
    weights = {weight.path: weight for weight in graph.weights}
    assert weights["halves"].low_dtype == "bfloat16"
    assert not weights["halves"].is_one_cast  # its gradient adds up in float32
    assert weights["count"].low_dtype == ""


def test_the_policy_is_asked() -> None:
    x = torch.randn(2, 16)
    policy = amp_fx.preset("torch").with_modules({"0": CastPolicy.FP32})
    low = amp_fx.explain(mlp(), policy=policy, dtype="float16")(x).low_weights()
    assert low == {"3.weight": torch.float16, "3.bias": torch.float16}


def test_tied_weights_are_not_among_them() -> None:
    model = linears(lambda m, x: m.head(m.first(x).relu()), "first", "head")
    model.head.weight = model.first.weight
    explanation = amp_fx.explain(model)(torch.randn(2, 8))
    assert list(explanation.low_weights()) == ["first.bias", "head.bias"]
    assert explanation.to_dict()["shared"] == ["first.weight", "head.weight"]


def test_what_the_model_hands_out_is_not_among_them() -> None:
    model = linears(lambda m, x: {"y": m.linear(x), "w": m.linear.weight.t()}, "linear")
    assert list(amp_fx.explain(model)(torch.randn(2, 8)).low_weights()) == ["linear.bias"]


def breaks() -> Any:
    def forward(model: Any, x: torch.Tensor) -> Any:
        y = model.linear(x)
        torch._dynamo.graph_break()
        return y + 1

    return linears(forward, "linear")


def hooked() -> nn.Module:
    def read_weight(module: Any, *args: Any) -> Any:
        return args[-1] * module.linear.weight.sum()

    model: nn.Module = linear()
    model.register_forward_hook(torch.compiler.disable(read_weight))  # type: ignore[no-untyped-call]
    return model


def skipped() -> nn.Module:
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call,untyped-decorator]
    def outer(model: Any, x: torch.Tensor) -> Any:
        return model.inner(x) * model.inner.linear.weight.sum()

    return Composed(lambda m, x: outer(m, x + 1), inner=linear())


@pytest.mark.parametrize("make", [breaks, hooked, skipped])
def test_where_something_else_may_read_weights_there_are_none(
    make: Callable[[], nn.Module],
) -> None:
    with torch.no_grad():
        explanation = amp_fx.explain(make())(torch.randn(2, 8))
    assert any(weight.low_dtype for graph in explanation.graphs for weight in graph.weights)
    assert explanation.low_weights() == {}
    assert not explanation.to_dict()["is_whole"]


def test_a_function_is_looked_into() -> None:
    model = linear()

    def step(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x).sum()
        return result

    low = amp_fx.explain(step)(torch.randn(2, 8)).low_weights()
    assert low == {"linear.weight": torch.bfloat16, "linear.bias": torch.bfloat16}


def test_they_are_known_on_the_meta_device() -> None:
    with torch.device("meta"):
        model, x = mlp(), torch.randn(2, 16)
    low = amp_fx.explain(model)(x).low_weights()
    assert low == amp_fx.explain(mlp())(torch.randn(2, 16)).low_weights()
