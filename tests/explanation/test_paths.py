"""Module paths: what explain prints works as a pattern, and means that very node."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import amp_fx
from amp_fx import Policy
from amp_fx.errors import PolicyWarning

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.explanation.records import NodeRecord

NAMES = st.one_of(
    st.sampled_from(["fn", "mod", "self", "net", "0", "12", "a[0]", "it's", "x*"]),
    st.text("abc01_[]*?! '", min_size=1, max_size=4),
).filter(lambda name: not hasattr(nn.ModuleDict(), name))


class Net(nn.Module):
    """Modules under given names, a plain list of modules, and an op outside of them."""

    def __init__(self, children: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(children)
        self.plain = [nn.Linear(2, 2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x)
        out: torch.Tensor = self.plain[0](x).exp()
        return out


LEAVES = st.sampled_from([nn.Linear]).map(lambda kind: kind(2, 2))
NETS = st.recursive(
    LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=2).map(Net), max_leaves=4
)


def as_module(net: nn.Module) -> Callable[..., Any]:
    return net


def as_closure(net: nn.Module) -> Callable[..., Any]:
    return lambda x: net(x).sin()


def as_argument(net: nn.Module) -> Callable[..., Any]:
    def program(x: torch.Tensor, model: nn.Module = net) -> Any:
        return model(x)

    return program


def beside_another(net: nn.Module) -> Callable[..., Any]:
    other = nn.Linear(2, 2)
    return lambda x: other(net(x))


def parts_of_it(net: nn.Module) -> Callable[..., Any]:
    nets: list[Any] = [nn.Sequential(net), nn.Linear(2, 2)]
    return lambda x: nets[1](nets[0][0](x))


def behind_a_break(net: nn.Module) -> Callable[..., Any]:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.net = nn.Linear(2, 2), net

        def forward(self, x: torch.Tensor) -> Any:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.net(x)

    return nn.Sequential(Broken())


WAYS = [as_module, as_closure, as_argument, beside_another, parts_of_it, behind_a_break]


def ops(program: Callable[..., Any], policy: Policy | None = None) -> list[NodeRecord]:
    torch._dynamo.reset()
    with torch.no_grad():  # Dynamo reads the .grad of what it resumes with
        found = amp_fx.explain(program, policy=policy)(torch.ones(2, 2))
    return [node for node in found.nodes if node.kind == "op"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@given(net=NETS)
@example(net=Net({"a[0]": nn.Linear(2, 2), "it's": Net({"fn": nn.Linear(2, 2)})}))
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_printed_path_is_a_pattern_for_its_node(
    way: Callable[[nn.Module], Callable[..., Any]], net: nn.Module
) -> None:
    program = way(net)
    before = ops(program)
    for path in {node.module for node in before if "linear" in node.op}:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PolicyWarning)
            after = ops(program, Policy.default().with_modules({path: "fp32"}))
        here = [n for n in after if n.module == path and "linear" in n.op]
        assert here, path
        assert all(node.origin == f"module {path!r}" for node in here), path


def test_functions_print_the_variable_in_front() -> None:
    net, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    found = {node.module for node in ops(lambda x: other(net(x)))}
    assert found == {"net.0", "other"}


def test_paths_are_those_of_named_modules() -> None:
    net = Net({"a": nn.Linear(2, 2), "b": Net({"c": nn.Linear(2, 2)})})
    known = {name for name, _ in net.named_modules()} | {"plain.0", "parts.b.plain.0"}
    for way in (as_module, behind_a_break):
        prefix = "" if way is as_module else "0.net."
        found = {node.module for node in ops(way(net))} - {"0.first"}
        assert {path.removeprefix(prefix).removeprefix("0.net") for path in found} <= known
