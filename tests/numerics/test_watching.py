"""``amp_fx.watch``: what it tells of a training, and that the training is none other."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.errors import CompileTargetError, OptionError
from amp_fx.numerics.watching import Watch, WatchLine
from tests.numerics.faults import Lambda


class Net(nn.Module):
    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.extra = Lambda(extra or torch.relu)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(self.extra(self.norm(self.first(x))), 0.2, self.training)
        out: torch.Tensor = self.last(h)
        return out


def train(
    net: nn.Module, steps: int, dtype: torch.dtype = torch.bfloat16, factor: float = 1.0
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(net(x), y) * factor
        torch.autograd.backward(loss)
        optimizer.step()
    return [t.detach().clone() for t in net.state_dict().values()]


def made(extra: Any = None) -> Net:
    torch.manual_seed(0)
    return Net(extra)


def test_the_training_is_the_same_to_the_bit() -> None:
    plain = train(made(), 5)
    net = made()
    with amp_fx.watch(net, every=2) as watch:
        watched = train(net, 5)
    assert [line.step for line in watch.lines] == [0, 2, 4]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    train(net, 2)
    assert len(watch.lines) == 3, "it was removed"


def test_numbers_are_those_of_the_step() -> None:
    """The same step under ``accuracy``, with the loss that the training has."""
    net = made()
    found: list[WatchLine] = []
    with amp_fx.watch(net, every=100, to=found.append):
        train(net, 1)
    other = made()
    torch.manual_seed(1)
    x, y = torch.randn(8, 16), torch.randint(4, (8,))

    def step() -> torch.Tensor:
        return nn.functional.cross_entropy(other(x), y)

    report = amp_fx.accuracy(step)()
    [line] = found
    seen = {n.name: n for n in line.report.nodes if n.stage == "forward" and n.module == "first"}
    assert seen
    for node in seen.values():
        twin = next(
            n
            for n in report.nodes
            if n.module == "other.first"
            and n.kernel == node.kernel
            and n.shape == node.shape
            and n.stage == "forward"
        )
        assert node.local == twin.local
        assert node.effect == pytest.approx(twin.effect, rel=0.05, abs=1e-7)


def test_overflows_flushed_gradients_and_a_scale(caplog: pytest.LogCaptureFixture) -> None:
    net = made(lambda x: (x * 1e3).square() * 1e-6)
    with amp_fx.watch(net, dtype="float16") as watch, caplog.at_level("INFO"):
        train(net, 1, torch.float16, factor=1e-4)
    [line] = watch.lines
    assert line.overflows > 0
    assert "overflows, first extra: square (forward)" in str(line)
    assert str(line) in caplog.text
    sound = made()
    with amp_fx.watch(sound, dtype="float16") as watch:
        train(sound, 1, torch.float16, factor=1e-6)
    [line] = watch.lines
    assert line.report.flushed_gradients > 0.1
    assert line.report.suggested_scale is not None
    assert line.report.suggested_scale[0] >= 16
    assert "% of gradients flushed; scale " in str(line)


class Recording:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.seen.append((name, text, step))


def test_tensorboard() -> None:
    net, writer = made(), Recording()
    with amp_fx.watch(net, every=3, writer=writer):
        train(net, 4)
    assert {step for *_, step in writer.seen} == {0, 3}
    names = {name for name, *_ in writer.seen}
    assert names == {f"amp_fx/{n}" for n in ("error", "overflows", "flushed_gradients", "line")}


def test_eval_and_no_grad_are_not_counted() -> None:
    net = made()
    with amp_fx.watch(net, every=1) as watch:
        net.eval()
        net(torch.randn(8, 16))
        net.train()
        with torch.no_grad():
            net(torch.randn(8, 16))
        train(net, 1)
    assert [line.step for line in watch.lines] == [0]


def test_a_compiled_model() -> None:
    net = made()
    compiled = amp_fx.compile(net, options={"compiler": "eager"})
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with amp_fx.watch(compiled, every=2) as watch:
        train(compiled, 4)
    assert [line.step for line in watch.lines] == [0, 2]
    after = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert after == before + 1, "what is looked at is not compiled anew"


def test_a_step_that_cannot_be_looked_at_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    net = made().double()
    with amp_fx.watch(net, dtype="float16"), caplog.at_level(logging.WARNING):
        net(torch.randn(8, 16).double()).sum().backward()
    assert net.first.weight.grad is not None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, OptionError, "every=0 is not a number of steps"),
        ({"to": 3}, OptionError, "cannot be called"),
        ({"writer": 3}, OptionError, "has no add_scalar"),
    ],
)
def test_options_are_checked(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        amp_fx.watch(nn.Linear(4, 4), **options)
    with pytest.raises(CompileTargetError, match="takes a module"):
        amp_fx.watch(len)  # type: ignore[arg-type]
    assert Watch.__doc__
    assert WatchLine.__doc__
