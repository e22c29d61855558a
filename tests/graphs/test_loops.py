"""Loops whose state becomes low in a bare call run as if the program restored its dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_rows
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._pytree import tree_leaves

from amp_fx.backend.cpp_compiler import has_cpp_compiler

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from amp_fx.passes.base import PassResult

    Restore = Callable[[Tensor], Tensor]
    Program = Callable[[Any, Tensor, Restore], Any]

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of prototypes


def scanned(net: Any, x: Tensor, restore: Restore) -> Any:
    def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        total = restore(net.linear(total + row))
        return total, restore(net.linear(row))

    return scan(step, x[0], x)


def scanned_low_rows(net: Any, x: Tensor, restore: Restore) -> Any:
    def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return restore(net.norm(net.linear(total) + row)), restore(row * 2)

    return scan(step, x[0], net.linear(x))


def scanned_low_state(net: Any, x: Tensor, restore: Restore) -> Any:
    def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return restore(total + row), row.clone()

    return scan(step, restore(net.linear(x)[0]), x)


def scan_in_scan(net: Any, x: Tensor, restore: Restore) -> Any:
    def inner(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        total = restore(net.linear(total) + row)
        return total, total.clone()

    def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        total, _ = scan(inner, total, row[None].expand(2, 8).contiguous())
        return restore(net.linear(total)), restore(net.linear(row))

    return scan(step, x[0], x)


def scan_in_branch(net: Any, x: Tensor, restore: Restore) -> Any:
    def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return restore(net.linear(total + row)), row.clone()

    return torch.cond(
        x.sum() > -1e9, lambda y: scan(step, y[0], y)[0], lambda y: restore(y[0].cos()), (x,)
    )


def looped(net: Any, x: Tensor, restore: Restore) -> Any:
    def step(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, restore(net.linear(y))

    return while_loop(lambda i, _: i < 3, step, (torch.tensor(0), x))  # type: ignore[no-untyped-call]


def looped_integer(net: Any, x: Tensor, restore: Restore) -> Any:
    def step(i: int, y: Tensor) -> tuple[int, Tensor]:
        return i + 1, restore(net.norm(net.linear(y)))

    return while_loop(lambda i, _: i < 3, step, (0, x))  # type: ignore[no-untyped-call]


def looped_over_closure(net: Any, x: Tensor, restore: Restore) -> Any:
    hidden = net.linear(x)

    def step(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, restore(y + net.linear(hidden))

    zero = torch.zeros_like(x)
    return while_loop(lambda i, _: i < 3, step, (torch.tensor(0), zero))  # type: ignore[no-untyped-call]


def condition_on_product(net: Any, x: Tensor, restore: Restore) -> Any:
    def condition(i: Tensor, y: Tensor) -> Any:
        return (i < 3) & (net.linear(y).sum() < 1e9)

    def step(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, restore(net.linear(y))

    return while_loop(condition, step, (torch.tensor(0), x))  # type: ignore[no-untyped-call]


def associated(net: Any, x: Tensor, restore: Restore) -> Any:
    def combine(a: Tensor, b: Tensor) -> Any:
        return restore(torch.mm(a, net.linear.weight) + b)

    return associative_scan(combine, x[:, None], 0, combine_mode="generic")


def mapped(net: Any, x: Tensor, restore: Restore) -> Any:  # noqa: ARG001 - a map has no state
    def each(row: Tensor, *_: Any) -> Any:
        return net.linear(net.norm(row))

    return map_rows(each, net.linear(x))


def attended(net: Any, x: Tensor, restore: Restore) -> Any:  # noqa: ARG001
    def score(value: Tensor, b: Any, h: Any, i: Tensor, j: Tensor) -> Any:  # noqa: ARG001
        return value + bias[i, j]

    q, k, bias = net.linear(x)[None, None], x[None, None], net.linear(x)
    return flex_attention(q, k, k, score_mod=score)


def branch(net: Any, y: Tensor, restore: Restore) -> Tensor:
    """One branch has a result in low precision."""
    return torch.cond(  # type: ignore[no-any-return]
        y.sum() > 0, lambda y: restore(net.linear(y)), lambda y: y.cos(), (y,)
    )


def loop_with_branch(net: Any, x: Tensor, restore: Restore) -> Any:
    def step(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, branch(net, y, restore)

    return while_loop(lambda i, _: i < 3, step, (torch.tensor(0), x))  # type: ignore[no-untyped-call]


def scan_with_branch(net: Any, x: Tensor, restore: Restore) -> Any:
    def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return branch(net, total + row, restore), branch(net, row, restore)

    return scan(step, x[0], x)


def map_with_branch(net: Any, x: Tensor, restore: Restore) -> Any:
    return map_rows(lambda row, *_: branch(net, row, restore) * 2, x)


def loop_in_map(net: Any, x: Tensor, restore: Restore) -> Any:
    return map_rows(lambda row, *_: looped(net, row, restore)[1] * 2, x)


def branch_in_scan_in_scan(net: Any, x: Tensor, restore: Restore) -> Any:
    def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        rows = row[None].expand(2, 8).contiguous()
        return scan_with_branch(net, rows, restore)[0], total.clone()

    return scan(step, x[0], x)


PROGRAMS: dict[str, Program] = {
    function.__name__: function
    for function in (
        scanned,
        scanned_low_rows,
        scanned_low_state,
        scan_in_scan,
        scan_in_branch,
        looped,
        looped_integer,
        looped_over_closure,
        condition_on_product,
        associated,
        mapped,
        attended,
        branch,
        loop_with_branch,
        scan_with_branch,
        map_with_branch,
        loop_in_map,
        branch_in_scan_in_scan,
    )
}
WITHOUT_BACKWARD = ("loop", "condition", "associated", "attended", "branch_in_scan")
"""Programs that torch cannot differentiate, by the beginning of their names."""


class Net(nn.Module):
    def __init__(self, name: str, restore: Restore) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.program, self.restore = PROGRAMS[name], restore

    def forward(self, x: Tensor) -> Any:
        return self.program(self, x, self.restore)


def run(net: Net, call: Callable[[Tensor], Any], *, is_trained: bool) -> list[Tensor]:
    net.requires_grad_(is_trained)
    results = [y for y in tree_leaves(call(torch.randn(8, 8))) if isinstance(y, torch.Tensor)]
    results = [y.float() for y in results]
    if is_trained:
        torch.stack([y.square().sum() for y in results if y.requires_grad]).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [*(y.detach() for y in results), *gradients]


def in_eager(name: str, *, is_trained: bool) -> list[Tensor]:
    net = Net(name, lambda y: y.float())
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        return run(net, net, is_trained=is_trained)


def compiled(name: str, compiler: str, *, is_trained: bool) -> list[Tensor]:
    net = Net(name, lambda y: y)
    torch.manual_seed(1)
    options: dict[str, Any] = {"compiler": compiler}
    call = torch.compile(net, backend="amp_fx", options=options, fullgraph=True)
    return run(net, call, is_trained=is_trained)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("compiler", ["aot_eager", "eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_states_are_restored(name: str, compiler: str) -> None:
    found, expected = (compiled(name, compiler, is_trained=False), in_eager(name, is_trained=False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "scan_in_scan" else [])
        for name in PROGRAMS
        if not name.startswith(WITHOUT_BACKWARD)
    ],
)
def test_gradients(name: str) -> None:
    found = compiled(name, "aot_eager", is_trained=True)
    torch.testing.assert_close(found, in_eager(name, is_trained=True), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.falls_back  # inductor cannot compile ``scan`` on CPUs
@pytest.mark.skipif(not has_cpp_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", PROGRAMS)
def test_inductor_compiles_them(name: str) -> None:
    found, expected = (
        compiled(name, "inductor", is_trained=False),
        in_eager(name, is_trained=False),
    )
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.falls_back
@pytest.mark.parametrize("name", ["scanned", "looped", "associated", "branch"])
def test_loops_run_if_the_graph_falls_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> PassResult:
        raise RuntimeError("no casts today")

    monkeypatch.setattr("amp_fx.passes.insert_casts.InsertCasts.call", fail)
    found = compiled(name, "aot_eager", is_trained=False)
    torch.testing.assert_close(found, in_eager(name, is_trained=False), rtol=0, atol=0)
