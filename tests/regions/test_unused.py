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
    """What is said of a policy with a pattern when a program is compiled."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy = Policy.default().with_modules({pattern: "fp32"})
        compiled(program, policy=policy)(*args or (X,))
    return [str(w.message) for w in caught if w.category is PolicyWarning]


def test_every_model_is_looked_at() -> None:
    """Also one that is made where another one was, which is gone."""
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


def test_a_module_that_is_not_called_is_none_the_less_there() -> None:
    model, other = net(), net()
    assert not warned(lambda x: model(x) if x.dim() == 2 else other(x), "other.0")


def test_a_module_that_a_called_function_uses() -> None:
    model = net()

    def inner(x: torch.Tensor) -> Any:
        return model(x)

    assert not warned(lambda x: inner(x) + 1, "0")
    assert not warned(lambda x: inner(x) + 1, "inner.0")


def test_a_graph_that_breaks_may_have_the_rest_elsewhere() -> None:
    first, second = net(), net()

    def inner(x: torch.Tensor) -> Any:
        return second(x)

    def program(x: torch.Tensor) -> Any:
        y = first(x)
        torch._dynamo.graph_break()
        return inner(y)

    assert not warned(program, "second.0")
    assert not warned(program, "first.0")
