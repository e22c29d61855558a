"""unused: patterns that nothing fits are warned of, for modules and for functions."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx import Policy
from amp_fx.errors import PolicyWarning
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

X = torch.ones(2, 2)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def warned(program: Callable[..., Any], pattern: Any, *args: Any) -> list[str]:
    """Returns the warnings about a policy with a pattern when a program is compiled."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy = Policy.default().with_modules({pattern: "fp32"})
        compiled(program, policy=policy)(*args or (X,))
    return [str(w.message) for w in caught if w.category is PolicyWarning]


def test_every_model_is_looked_at() -> None:
    """Covers a model that reuses the memory of a freed one."""
    assert all(len(warned(net(), "layers.0")) == 1 for _ in range(20))


def test_a_model_is_told_of_once() -> None:
    model = net()
    assert len(warned(model, "layers.0")) == 1
    assert not warned(model, "layers.0")
    assert len(warned(model, "layers.1")) == 1


@pytest.mark.parametrize("pattern", ["1", "model.1", "model", "mod*", nn.Linear, "re:.*\\.0"])
def test_patterns_that_fit_in_a_function(pattern: Any) -> None:
    model = net()
    assert not warned(lambda x: model(x).relu(), pattern)


@pytest.mark.parametrize("pattern", ["2", "model.2", "other", nn.LayerNorm])
def test_patterns_that_fit_nothing_in_a_function(pattern: Any) -> None:
    model = net()
    [message] = warned(lambda x: model(x).relu(), pattern)
    assert "'model.0', 'model.1'" in message or "near" not in message
    assert "start at a variable of the function" in message


def test_a_module_that_is_not_called_has_no_op() -> None:
    model, other = net(), net()
    [message] = warned(lambda x: model(x) if x.dim() == 2 else other(x), "other.0")
    assert "have no op in the graphs of" in message


def test_a_module_that_a_called_function_uses() -> None:
    model = net()

    def inner(x: torch.Tensor) -> Any:
        return model(x)

    assert not warned(lambda x: inner(x) + 1, "0")
    assert not warned(lambda x: inner(x) + 1, "inner.0")


def test_a_graph_that_breaks_may_have_the_rest_elsewhere() -> None:
    """The modules of later graphs are only known after the last one."""
    first, second = net(), net()

    def inner(x: torch.Tensor) -> Any:
        return second(x)

    def program(x: torch.Tensor) -> Any:
        y = first(x)
        torch._dynamo.graph_break()
        return inner(y)

    assert not warned(program, "inner.0")
    assert not warned(program, "first.0")
    assert len(warned(program, "second.0")) == 1


class Uncalled(nn.Module):
    """Reads the weight of a module without calling the module."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.called, self.spare = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.called(x) @ self.table.weight
        return out


@pytest.mark.parametrize("has_break", [False, True])
@pytest.mark.parametrize("pattern", ["table", "spare", "called"])
def test_a_module_without_ops(pattern: str, has_break: bool) -> None:
    class Broken(Uncalled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if has_break:
                x = x.sin()
                torch._dynamo.graph_break()
            return super().forward(x)

    model = Broken()
    messages = warned(model, pattern)
    if pattern == "called":
        assert not messages
    else:
        [message] = messages
        assert f"{pattern!r} of the policy have no op in the graphs of Broken" in message
    assert not warned(model, pattern), "once"


def test_a_module_without_the_op_of_an_override() -> None:
    torch._dynamo.reset()
    policy = Policy.default().with_modules({"0": {"softmax": "fp32"}, "1": {"linear": "fp32"}})
    with pytest.warns(PolicyWarning, match="'0' of the policy have no 'softmax'"):
        compiled(net(), policy=policy)(X)
