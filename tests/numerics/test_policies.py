"""``amp_fx.accuracy`` under a policy: its two losses are those of compiled code and of float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx.errors import UnsupportedError
from tests.programs import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

POLICY = amp_fx.preset("torch").with_ops({"softmax": "lower_precision_fp", "gelu": "fp32"})

# Dynamo's, where a graph breaks and where it looks at a custom function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = 2 * x * grad
        return result


square: Any = Square.apply


class Net(nn.Module):
    def __init__(self, program: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.up, self.down, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.program(self, x).float().square().mean()
        return result

    def mlp(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)).softmax(-1))
        return result


def broken(net: Net, x: Tensor) -> Tensor:
    y = net.up(x)
    torch._dynamo.graph_break()
    result: Tensor = net.mlp(y)
    return result


def written(net: Net, x: Tensor) -> Tensor:
    y = net.up(x)
    y[0] = 0
    result: Tensor = y.mul_(2).softmax(-1)
    return result


PROGRAMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "plain": lambda net, x: net.mlp(x),
    "graph break": broken,
    "writes": written,
    "statistics": lambda net, x: net.norm(net.mlp(x)),
    "dropout": lambda net, x: F.dropout(net.mlp(x), 0.5),
    "checkpoint": lambda net, x: checkpoint(net.mlp, x, use_reentrant=False),
    "reentrant checkpoint": lambda net, x: checkpoint(net.mlp, net.up(x), use_reentrant=True),
    "branch": lambda net, x: torch.cond(x.sum() > -1e9, net.mlp, lambda a: net.up(a).cos(), (x,)),
    "custom function": lambda net, x: square(net.mlp(x)),
    "attention": lambda net, x: net.attention(x[None], x[None], x[None])[0],
    "gradient": lambda net, x: torch.func.grad(lambda a: (a @ net.up.weight).square().sum())(x),
    "complex numbers": lambda net, x: torch.fft.rfft(net.mlp(x).float()).abs(),
}


def inputs() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_are_those_of_compiled_code_and_of_float32(name: str) -> None:
    net = Net(PROGRAMS[name])
    before = {key: value.clone() for key, value in net.state_dict().items()}
    torch.manual_seed(2)
    report = amp_fx.accuracy(net, policy=POLICY)(inputs())
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    call, twin = compiled(net, policy=POLICY, weight_cache=False), Net(PROGRAMS[name])
    torch.manual_seed(2)
    exact = twin(inputs()).item()
    with torch.autocast("cpu"):
        torch.manual_seed(2)
        low = call(inputs()).item()
    assert report.loss == pytest.approx(low, rel=1e-6)
    assert report.reference_loss == pytest.approx(exact, rel=1e-5)
    assert report.predicted_error == pytest.approx(report.error, rel=0.25)
    assert {node.file for node in report.nodes if node.stage == "forward"} == {__file__}
    assert bool(report.not_examined) == (name in ("graph break", "custom function"))


def test_modules_and_ops_are_those_of_the_program() -> None:
    report = amp_fx.accuracy(Net(PROGRAMS["plain"]), policy=POLICY)(inputs())
    products = {n.module for n in report.nodes if n.op == "linear" and n.stage == "forward"}
    assert products == {"up", "down"}
    [softmax] = [n for n in report.nodes if n.op == "softmax" and n.stage == "forward"]
    assert (softmax.dtype, softmax.module) == ("bfloat16", "")
    assert softmax.code == "result: Tensor = self.down(F.gelu(self.up(x)).softmax(-1))"


def backward_inside(net: Net, x: Tensor) -> Tensor:
    y = net.mlp(x)
    y.sum().backward()  # type: ignore[no-untyped-call]
    return y


def raising(net: Net, x: Tensor) -> Tensor:
    net.norm(net.up(x))
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (backward_inside, UnsupportedError, "the step calls backward itself"),
        (raising, KeyError, "mine"),
    ],
)
def test_what_cannot_be_examined_is_said_and_changes_nothing(
    program: Any, error: type[Exception], message: str
) -> None:
    net = Net(program)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    random = torch.get_rng_state()
    with pytest.raises(error, match=message):
        amp_fx.accuracy(net, policy=POLICY)(inputs())
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_a_step_that_dynamo_captures_nothing_of() -> None:
    lstm = nn.LSTM(8, 8)
    with pytest.raises(UnsupportedError, match="Dynamo captured no graph of the step"):
        amp_fx.accuracy(lambda x: lstm(x)[0], policy=POLICY)(inputs())
