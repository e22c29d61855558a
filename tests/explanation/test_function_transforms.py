"""``explain``, ``draw`` and ``accuracy`` on transforms of torch.func and on higher-order ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import amp_fx

if TYPE_CHECKING:
    from collections.abc import Callable


def loss_of(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x).float().square().sum()
    return out


def by_scan(layer: nn.Module, x: Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = carry + layer(row).float()
        return new, new.clone()

    return scan(step, torch.zeros(4), x)[1]


def by_associative_scan(layer: nn.Module, x: Tensor) -> Any:
    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan(lambda a, b: a * b, layer(x).float(), 0, combine_mode="generic")


def by_while_loop(layer: nn.Module, x: Tensor) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    first = torch.zeros((), dtype=torch.int64)
    loop: Any = while_loop
    return loop(lambda i, _: i < 3, lambda i, a: (i + 1, layer(a).float()), (first, x))[1]


def by_map(layer: nn.Module, x: Tensor) -> Any:
    from torch._higher_order_ops.map import map as map_rows

    map_any: Any = map_rows
    return map_any(layer, x)


def by_cond(layer: nn.Module, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, layer, lambda a: layer(-a), (x,))


def by_flex(layer: nn.Module, x: Tensor) -> Any:
    q = layer(x).float().reshape(1, 1, 4, 4)
    return flex_attention(q, q, q)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap": lambda m, x: torch.vmap(m)(x),
    "vmap of vmap": lambda m, x: torch.vmap(torch.vmap(m))(x.expand(2, 4, 4)),
    "grad": lambda m, x: torch.func.grad(lambda a: loss_of(m, a))(x),
    "grad_and_value": lambda m, x: torch.func.grad_and_value(lambda a: loss_of(m, a))(x)[0],
    "vmap of grad": lambda m, x: torch.vmap(torch.func.grad(lambda a: loss_of(m, a)))(x),
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (x,))[1],
    "vjp": lambda m, x: torch.func.vjp(lambda a: m(a).float(), x)[1](x)[0],
    "jacrev": lambda m, x: torch.func.jacrev(lambda a: m(a).float())(x),
    "jacfwd": lambda m, x: torch.func.jacfwd(lambda a: m(a).float())(x),
    "hessian": lambda m, x: torch.func.hessian(lambda a: loss_of(m, a))(x),
    "linearize": lambda m, x: torch.func.linearize(m, x)[1](x),
    "functionalize": lambda m, x: torch.func.functionalize(m)(x),
    "functional_call": lambda m, x: torch.func.functional_call(m, dict(m.named_parameters()), (x,)),
    "checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "cond": by_cond,
    "while_loop": by_while_loop,
    "map": by_map,
    "scan": by_scan,
    "associative_scan": by_associative_scan,
    "flex_attention": by_flex,
}


BODIES = ("while_loop", "map", "scan")
"""Ops that hold their products in a body: a picture shows them as one op."""


class Through(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.transform = TRANSFORMS[name]

    def forward(self, x: Tensor) -> Any:
        return self.transform(self.layer, x)


@pytest.mark.falls_back  # eager code runs what Dynamo cannot capture
@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
@pytest.mark.parametrize("name", TRANSFORMS)
def test_they_are_explained_and_drawn(name: str) -> None:
    x = torch.randn(4, 4)
    with torch.set_grad_enabled(name != "flex_attention"):  # has no backward on the CPU
        explanation = amp_fx.explain(Through(name))(x)
    ops = [node.op for graph in explanation.graphs for node in graph.nodes]
    assert any(part in op for op in ops for part in ("linear", "mm", *BODIES))
    assert "digraph" in amp_fx.draw(explanation).source


@pytest.mark.falls_back
@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
@pytest.mark.parametrize("name", TRANSFORMS)
def test_their_accuracy_is_reported(name: str) -> None:
    model, x = Through(name).eval(), torch.randn(4, 4)
    with torch.no_grad():
        exact = float(model(x).float().square().sum())

    def step(x: Tensor) -> Tensor:
        out: Tensor = model(x).float().square().sum()
        return out

    with torch.no_grad():
        report = amp_fx.accuracy(step)(x)
    assert report.reference_loss == pytest.approx(exact, rel=1e-5)
