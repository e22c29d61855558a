"""Programs that use ``torch.func``, forward-mode AD and higher-order ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_rows
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import amp_fx

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of transforms and of Dynamo

if TYPE_CHECKING:
    from collections.abc import Callable

    Program = Callable[[nn.Module, torch.Tensor], object]


def loop(layer: nn.Module, x: torch.Tensor) -> object:
    def step(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, layer(y).float()

    zero = torch.tensor(0)
    return while_loop(lambda i, y: i < 3, step, (zero, x))  # type: ignore[no-untyped-call]  # noqa: ARG005


def running_sum(layer: nn.Module, x: torch.Tensor) -> object:
    def step(total: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer(total + row).float(), row * 2

    return scan(step, x[0], x)


def classes(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.arange(x.shape[1]), x.shape[2])


PROGRAMS: dict[str, Program] = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "vmap of vmap": lambda f, x: torch.vmap(torch.vmap(f))(x),
    "vmap in chunks": lambda f, x: torch.vmap(f, chunk_size=2)(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda r: f(r).pow(2).sum()))(x),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "grad_and_value": lambda f, x: torch.func.grad_and_value(lambda y: f(y).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(4, 3, 8)),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0, 0]),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x[0, 0]),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).pow(3).sum())(x[0, 0]),
    "grad with one_hot": lambda f, x: torch.func.grad(lambda y: (f(y) * classes(x)).sum())(x),
    "functional_call": lambda f, x: torch.func.functional_call(f, dict(f.named_parameters()), (x,)),
    "functionalize": lambda f, x: torch.func.functionalize(lambda y: f(y).add_(1))(x),
    "cond": lambda f, x: torch.cond(x.sum() > 0, f, lambda y: f(y) * 2, (x,)),
    "while_loop": loop,
    "map": map_rows,
    "scan": running_sum,
    "associative_scan": lambda f, x: associative_scan(torch.mul, f(x), 0, combine_mode="generic"),
    "checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False),
}


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.program = program

    def forward(self, x: torch.Tensor) -> object:
        return self.program(self.layer, x)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_shows_the_product_or_the_op_that_it_is_in(name: str) -> None:
    explanation = amp_fx.explain(Net(PROGRAMS[name]))(torch.randn(4, 3, 8))
    assert "linear" in str(explanation) or "not rewritten" in str(explanation)
    assert amp_fx.draw(explanation)


def outputs(net: nn.Module, x: torch.Tensor, *, is_low: bool) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_low):
        leaves = [leaf for leaf in tree_leaves(net(x)) if leaf.is_floating_point()]
    return torch.cat([leaf.detach().double().flatten() for leaf in leaves])


@pytest.mark.parametrize("name", PROGRAMS)
def test_accuracy_tells_the_error_of_eager_autocast_or_what_it_left_out(name: str) -> None:
    net, x = Net(PROGRAMS[name]), torch.randn(4, 3, 8)
    report = amp_fx.accuracy(net)(x)
    exact = outputs(net, x, is_low=False)
    error = (outputs(net, x, is_low=True) - exact).norm() / exact.norm()
    left_out = {record.op for record in report.not_examined}
    if name in ("map", "scan"):
        assert left_out == {"map": {"map_impl"}, "scan": {"scan"}}[name]
    else:
        assert report.output_error == pytest.approx(float(error), rel=0.02)


def tangent_of_product(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t) @ w  # type: ignore[no-untyped-call]
        tangent: torch.Tensor = forward_ad.unpack_dual(dual).tangent  # type: ignore[no-untyped-call]
    return tangent @ w


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_forward_mode_ad_runs_as_eager_autocast_runs_it(compiler: str) -> None:
    x, t, w = torch.randn(3, 4, 4)
    compiled = torch.compile(
        tangent_of_product, backend="amp_fx", options={"compiler": compiler}, fullgraph=True
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = tangent_of_product(x, t, w), compiled(x, t, w)
    assert expected.dtype == found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@torch.library.custom_op("amp_fx_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.falls_back
def test_transform_that_cannot_be_analysed_runs_all_the_same() -> None:
    calls: list[torch.Tensor] = []

    @doubled.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) == 2:  # Dynamo captures the graph in the first call
            raise RuntimeError("no analysis today")
        return torch.empty_like(x)

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        tangent: torch.Tensor = torch.func.jvp(lambda y: y @ doubled(w), (x,), (x,))[1]
        return tangent

    x, w = torch.randn(2, 4, 4)
    compiled = torch.compile(program, backend="amp_fx", options={"compiler": "eager"})
    found = compiled(x, w)
    assert len(calls) > 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(found, program(x, w).float())
