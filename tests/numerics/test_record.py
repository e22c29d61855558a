"""``amp_fx.record`` and ``diff``: runs of one program are equal, planted changes are found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import amp_fx
from amp_fx.commands.cli import main
from amp_fx.errors import ArgumentTypeError, OptionError
from amp_fx.numerics.trace import SAMPLE, Trace
from tests.numerics.faults import TinyGPT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Block(nn.Module):
    """A layer whose product may be off by one unit, or whose difference cancels."""

    def __init__(self, is_off: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.is_off = nn.Linear(16, 16), nn.LayerNorm(16), is_off

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        y = y * 1.01 if self.is_off else y * 1.0
        return x + torch.tanh(self.norm(y))


def stack(off: int | None = None, depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(is_off=place == off) for place in range(depth)))


def loss_of(model: nn.Module, is_low: bool = True) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=is_low):
            y: torch.Tensor = model(x)
        return y.float().square().mean()

    return step


def x() -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


@settings(max_examples=3, deadline=None)
@given(off=st.integers(0, 2))
def test_the_layer_that_was_changed_differs_first(off: int) -> None:
    before = amp_fx.record(loss_of(stack()))(x())
    same = before.diff(amp_fx.record(loss_of(stack()))(x()))
    assert (same.ops, same.first, same.only_before, same.only_after) == ((), None, 0, 0)
    found = before.diff(amp_fx.record(loss_of(stack(off)))(x()))
    assert found.first is not None
    assert (found.first.stage, found.first.module, found.first.op) == ("forward", f"{off}", "mul")
    assert found.first.source.endswith("y = y * 1.01 if self.is_off else y * 1.0")
    modules = [op.module for op in found.ops if op.stage == "forward" and op.module]
    assert min(int(module.split(".")[0]) for module in modules) == off
    assert {op.stage for op in found.ops} == {"forward", "backward", "result"}


class Variance(nn.Module):
    """Cancels: ``E[x^2] - E[x]^2`` far from zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 100
        return (x * x).mean(-1) - x.mean(-1) ** 2


def test_the_op_that_amplifies_is_named() -> None:
    model = Variance()
    low = torch.randn(64, 256).bfloat16()
    before, after = (amp_fx.record(model)(value) for value in (low.float(), low.float() + 1e-5))
    found = before.diff(after)
    assert [op.op for op in found.amplifiers] == ["sub"]
    assert found.amplifiers[0].error > 100 * found.amplifiers[0].error_in
    assert 0 < sum(op.is_rounding for op in found.ops) < len(found.ops)
    assert found.amplifiers[0].source.endswith("return (x * x).mean(-1) - x.mean(-1) ** 2")


def test_brackets_of_a_line_of_code_are_printed() -> None:
    weight, rows = torch.randn(8, 8), torch.randn(8, 8)

    def step(offset: float) -> torch.Tensor:
        i = 2
        return (rows[i] @ weight + offset).exp().sum()

    before, after = amp_fx.record(step)(0.0), amp_fx.record(step)(1.0)
    table = str(before.diff(after)).partition("ratio")[2]
    assert "return (rows[i] @ weight + offset).exp().sum()" in table


def test_another_dtype_is_told() -> None:
    low, wide = (amp_fx.record(loss_of(stack(), is_low))(x()) for is_low in (True, False))
    found = low.diff(wide)
    assert found.first is not None
    assert "torch.float32 instead of torch.bfloat16" in found.first.difference.note
    assert ("bfloat16", "float32") in {op.dtypes for op in found.amplifiers}


def test_a_backward_has_the_module_of_its_forward() -> None:
    """Dropout makes an op without a node of autograd between the nodes of the norm and its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
    trace = amp_fx.record(model)(x())
    modules = {op.op: op.module for op in trace.ops if op.stage == "backward"}
    assert (modules["batch_norm_backward"], modules["mm"]) == ("1", "0")


@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_an_optimizer_on_lists_is_an_update(how: str) -> None:
    def trained(learning_rate: float) -> Trace:
        torch.manual_seed(0)
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), learning_rate, **{how: True})

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return amp_fx.record(step)()

    updates = [op for op in trained(0.1).ops if op.stage == "update"]
    assert {tuple(op.shape) for op in updates} >= {(8, 8), (8,)}
    first = trained(0.1).diff(trained(0.2)).first
    assert first is not None
    assert first.stage == "update"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_zeros_of_forward_mode_have_no_data() -> None:
    """The tangent of a bias is a tensor without memory."""
    layer, value = nn.Linear(16, 4), x()
    trace = amp_fx.record(lambda value: torch.func.jvp(layer, (value,), (value,)))(value)
    assert [op.op for op in trace.ops if op.stage == "forward"].count("addmm") == 1
    assert torch.isfinite(torch.cat([op.values for op in trace.ops])).all()


def test_what_amp_fx_compiled_has_its_casts() -> None:
    model = stack(depth=2)
    native = amp_fx.record(loss_of(model))(x())
    step = amp_fx.compile(model, options={"compiler": "eager"})
    products = [
        [(op.module, op.dtype) for op in trace.ops if op.op == "addmm"]
        for trace in (native, amp_fx.record(step)(x()))
    ]
    expected = [("0.linear", "bfloat16"), ("1.linear", "bfloat16")]
    assert products == [expected, expected]


def test_a_file_holds_samples_and_sees_every_element(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = TinyGPT(), TinyGPT.inputs()
    whole = amp_fx.record(model, tmp_path / "a.trace")(*inputs)
    read = Trace.load(tmp_path / "a.trace")
    assert all(op.values.numel() <= SAMPLE for op in read.ops)
    assert not read.diff(whole).ops
    plain = [{**vars(op), "values": op.values.tolist()} for op in whole.ops]
    assert [{**vars(op), "values": op.values.tolist()} for op in read.ops] == plain
    assert (tmp_path / "a.trace").stat().st_size < 1200 * len(read.ops)

    value = torch.randn(100, 1000)
    other = value.clone()
    other[0, 1] += 1  # not in the sample
    amp_fx.record(torch.neg, tmp_path / "b.trace")(value)
    amp_fx.record(torch.neg, tmp_path / "c.trace")(other)
    found = Trace.load(tmp_path / "b.trace").diff(Trace.load(tmp_path / "c.trace"))
    assert found.first is not None
    assert found.first.op == "neg"
    assert "not in the sample" in str(found.first)


def test_the_command_and_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("a.trace", "b.trace")]
    for path, off in zip(paths, (None, 1), strict=True):
        amp_fx.record(loss_of(stack(off)), path)(x())
    assert main(["diff", paths[0], paths[0]]) == 0
    assert main(["diff", *paths]) == 1
    assert "first: mul in 1" in capsys.readouterr().out
    assert main(["diff", *paths, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first"]["module"] == "1"
    (tmp_path / "no.trace").write_text("nothing")
    for name in ("no.trace", "missing.trace"):
        assert main(["diff", paths[0], str(tmp_path / name)]) == 2
        assert "is not a trace" in capsys.readouterr().err
    with pytest.raises(ArgumentTypeError, match="expects a module or a function"):
        amp_fx.record(3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="does not exist"):
        amp_fx.record(stack(), tmp_path / "nowhere" / "a.trace")
    with pytest.raises(ArgumentTypeError, match="path must be the path of a file, got Tensor"):
        amp_fx.record(stack(), x())  # type: ignore[arg-type]


def test_a_trace_of_another_version_is_refused(tmp_path: Path) -> None:
    content: dict[str, Any] = {"amp_fx trace": 0}
    torch.save(content, tmp_path / "old.trace")
    with pytest.raises(OptionError, match="another version"):
        Trace.load(tmp_path / "old.trace")


def test_tensors_without_dense_data_are_left_out() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged).sin()
        x.to("meta").sin()
        return x.to_sparse().sin().to_dense()

    result = amp_fx.record(step)(torch.ones(2, 2)).ops[-1]
    assert result.stage == "result"
    assert torch.equal(result.values, torch.ones(4).sin())
