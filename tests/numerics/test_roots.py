"""Steps that call modules: the paths of every tool begin at the modules that users compile."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx.errors import PolicyWarning

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Overflowing(nn.Module):
    """Its last layer overflows in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        nn.init.constant_(self.head.weight, 1e4)
        nn.init.ones_(self.body.weight)

    @wrapped
    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x) + 8)


def compiled(program: Any, policy: amp_fx.Policy, action: Any = "error") -> Any:
    torch._dynamo.reset()
    options: dict[str, Any] = {"policy": policy, "dtype": torch.float16, "compiler": "eager"}
    with warnings.catch_warnings():
        warnings.simplefilter(action, PolicyWarning)
        call: Any = torch.compile(program, backend="amp_fx", options=options)
        return call(X)


def test_a_policy_found_for_a_step_is_one_of_its_module() -> None:
    net, loss = Overflowing(), nn.MSELoss()

    def step(x: Tensor) -> Any:
        return loss(net(x), torch.zeros(4, 4))

    def parts(x: Tensor) -> Any:
        return loss(net.head(net.body(x) + 8), torch.zeros(4, 4))

    assert not compiled(net, amp_fx.Policy.default()).isfinite().all()
    for program in (step, parts):
        result = amp_fx.search(program, tolerance=1e-2, dtype="float16")(X)
        assert "head" in {unit.module for unit in result.units} <= {"head", "body"}
        assert result.report.roots == ()
        assert {name.name for name in result.report.gradients} <= {*dict(net.named_parameters())}
        assert compiled(net, result.policy).isfinite().all()
        assert compiled(program, result.policy).isfinite()


def test_a_step_of_two_modules() -> None:
    first, second = Overflowing(), nn.Sequential(Overflowing())

    def step(x: Tensor) -> Any:
        return (first(x) - second(x)).float().square().mean()

    result = amp_fx.search(step, tolerance=1e-2, dtype="float16")(X)
    found = {unit.module for unit in result.units}
    assert {"head", "0.head"} <= found <= {"head", "0.head", "body", "0.body"}
    assert result.report.roots == (("first", "Overflowing"), ("second", "Sequential"))
    modules = {node.module for node in result.report.nodes}
    assert {"first.head", "second.0.head"} <= modules
    assert "root modules: first (Overflowing), second (Sequential)" in str(result.report)
    assert compiled(step, result.policy).isfinite()
    for net in (first, second):  # the pattern of the other module matches none
        assert compiled(net, result.policy, action="ignore").isfinite().all()


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_the_other_tools(is_wrapped: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    if is_wrapped:
        Net.forward = wrapped(wrapped(Net.forward))  # type: ignore[method-assign]
    net = Net().eval()
    named = {f"inner.{name}" for name in ("weight", "bias")}

    def step(x: Tensor) -> Any:
        return net(x).float().sum()

    for program in (net, step):
        explanation = amp_fx.explain(program)(X)
        assert {w.path for graph in explanation.graphs for w in graph.weights} == named
        assert "inner" in {node.module for node in explanation.nodes}
        assert "inner" in str(amp_fx.draw(explanation).source)
        assert "inner" in {op.module for op in amp_fx.record(program)(X).ops}
    assert any(use.module == "inner" for use in amp_fx.audit(step)(X).uses)
    torch._dynamo.reset()
    with torch.no_grad():
        call: Any = torch.compile(net, backend="amp_fx", options={"compiler": "aot_eager"})
        call(X)
    stored = amp_fx.store_low(net)(X)
    assert {weight.path for weight in stored.stored} == named
