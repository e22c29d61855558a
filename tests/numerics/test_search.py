"""``amp_fx.search``: sets that repair, and what cannot be."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx.errors import OptionError, UnsupportedError
from tests.numerics.faults import WIDTH, Bare, Scores, TinyGPT, broken
from tests.programs import compiled

if TYPE_CHECKING:
    from pathlib import Path

f16 = torch.float16
F16: dict[str, Any] = {"dtype": f16, "tolerance": 3e-2, "scale": 1024.0}


def uneven(places: tuple[int, int]) -> TinyGPT:
    """Twelve layers with names of their own, so that none is like another; three have a fault."""
    net = broken(places, depth=12)
    layers = {f"layer_{chr(ord('a') + i)}": layer for i, layer in enumerate(net.h)}
    del net.h
    for name, layer in layers.items():
        net.add_module(name, layer)
    net.h = [*layers.values()]  # type: ignore[assignment]
    return net


def error_under(policy: amp_fx.Policy, net: nn.Module, inputs: Any) -> float:
    exact = float(net(*inputs).detach())
    torch.compiler.reset()
    with torch.autocast("cpu", f16):
        found = compiled(net, policy=policy, weight_cache=False)(*inputs)
    return abs(float(found.detach()) - exact) / abs(exact)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "places"), [(0, (1, 7)), (1, (9, 2))])
def test_three_faults_among_many_ops(seed: int, places: tuple[int, int], tmp_path: Path) -> None:
    torch.manual_seed(seed)
    net, inputs = uneven(places), TinyGPT.inputs()
    result = amp_fx.search(net, **F16)(*inputs)
    assert result.num_units >= 50
    assert result.evaluations <= 25
    assert result.is_minimal
    assert {unit.module.partition(".")[0] for unit in result.units} == {
        *(f"layer_{chr(ord('a') + place)}" for place in places),
        "loss",
    }
    assert math.isinf(result.before)
    assert result.value <= 3e-2
    assert error_under(result.policy, net, inputs) < 3e-2
    tried = {e.units: e.is_enough for e in result.history}
    names = tuple(map(str, result.units))
    for name in names:
        assert tried[tuple(n for n in names if n != name)] is False, "it was asked of each"
    path = tmp_path / "amp.toml"
    result.policy.save(path)
    assert amp_fx.Policy.load(path) == result.policy
    assert path.read_text().count('fp32"') == len(result.units)
    assert "none can be left out" in str(result)
    assert result.to_dict()["evaluations"] == result.evaluations


def test_runs_leave_the_step_alone_and_capture_it_once_each() -> None:
    torch.manual_seed(0)
    net = Bare(Scores())
    before = {name: t.clone() for name, t in net.state_dict().items()}
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    result = amp_fx.search(net, **F16)(*Bare.inputs())
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    captured = torch._dynamo.utils.counters["stats"]["unique_graphs"] - frames
    assert captured == result.evaluations


def test_an_op_that_only_the_policy_at_the_start_makes_low_is_found() -> None:
    def decay(x: Tensor) -> Tensor:
        return (x.float() * 1e-3).exp() - 1

    policy = amp_fx.preset("torch").with_ops({"exp": "lower_precision_fp"})
    torch.manual_seed(0)
    result = amp_fx.search(decay, tolerance=1e-3, policy=policy)(torch.randn(4, 8))
    assert [str(unit) for unit in result.units] == ["*: exp"]
    assert result.before > 0.1
    assert result.units[0].why == f"without it, the value is {result.before:.2g}"


def test_a_step_that_dynamo_captures_nothing_of() -> None:
    lstm = nn.LSTM(8, 8)
    with pytest.raises(UnsupportedError, match="Dynamo captured no graph of the step"):
        amp_fx.search(lambda x: lstm(x)[0], tolerance=1e-2)(torch.randn(4, 8))


def test_alike_layers_are_one_candidate() -> None:
    torch.manual_seed(0)
    net = TinyGPT()
    for layer in net.h:
        layer.extra = Scores()
    result = amp_fx.search(net, **F16)(*TinyGPT.inputs())
    assert [(u.module, u.op) for u in result.units] == [("h.*.extra", "matmul")]


def test_nothing_is_changed_where_nothing_is_wrong() -> None:
    result = amp_fx.search(Bare(), tolerance=0.05)(*Bare.inputs())
    assert (result.units, result.evaluations, result.is_minimal) == ((), 1, True)
    assert result.policy == amp_fx.Policy.default()


def test_a_fault_inside_of_a_branch() -> None:
    torch.manual_seed(0)
    first, scores = nn.Linear(WIDTH, WIDTH), Scores()

    def step(x: Tensor) -> Tensor:
        x = first(x)
        found: Tensor = torch.cond(x.sum() > -1e9, scores, lambda a: a.sin(), (x,))
        return found.float().square().mean()

    result = amp_fx.search(step, **F16)(torch.randn(4, 16, WIDTH))
    assert [(u.module, u.op) for u in result.units] == [("scores", "matmul")]


def test_modules_that_must_stay_low() -> None:
    torch.manual_seed(0)
    net = Bare(Scores())
    search = amp_fx.search(net, **F16, keep="bad")
    with pytest.raises(
        UnsupportedError, match="out of reach: with everything that a policy reaches"
    ):
        search(*Bare.inputs())


def test_a_metric_of_ones_own() -> None:
    torch.manual_seed(0)
    net, inputs = Bare(Scores()), Bare.inputs()

    def metric(low: Tensor, exact: Tensor) -> float:
        return abs(float(low) - float(exact))

    result = amp_fx.search(net, **F16, metric=metric)(*inputs)
    exact = float(net(*inputs).detach())
    assert result.value == pytest.approx(error_under(result.policy, net, inputs) * exact)
    assert [(u.module, u.op) for u in result.units] == [("bad", "matmul")]


def raising(*_: Any) -> float:
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"metric": raising}, UnsupportedError, "the metric raised KeyError: 'oops'"),
        ({"metric": lambda *_: "good"}, UnsupportedError, "returned 'good', which is not a number"),
        ({"tolerance": 0.0}, UnsupportedError, r"out of reach: .* it is \d.*, the best was"),
        ({"tolerance": -1}, OptionError, "tolerance=-1 is not a number of at least 0"),
        ({"budget": 0}, OptionError, "budget=0 is not a number of runs"),
        ({"keep": 3}, OptionError, "give patterns"),
        ({"budget": 1, "tolerance": 1e-9}, UnsupportedError, "give a larger budget"),
    ],
)
def test_what_cannot_be(options: Any, error: type[Exception], message: str) -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        if torch.is_autocast_enabled("cpu"):
            y = y.bfloat16().float()  # by hand: no policy reaches it
        return y.square().mean()

    given = {"tolerance": 1e-2, **options}
    with pytest.raises(error, match=message):
        amp_fx.search(step, **given)(torch.randn(8, 8), torch.randn(8, 8))


def test_a_step_that_differs_from_run_to_run() -> None:
    numbers = random.Random(0)

    def step(x: Tensor) -> Tensor:
        return (x @ torch.full((8, 8), numbers.random())).square().mean()

    with pytest.raises(UnsupportedError, match="differs from run to run, by"):
        amp_fx.search(step, tolerance=1e-3)(torch.randn(4, 8))


def test_a_step_that_is_not_finite() -> None:
    with pytest.raises(UnsupportedError, match="itself gives infinite numbers or NaN in float32"):
        amp_fx.search(nn.Linear(8, 8), tolerance=1e-2)(torch.full((4, 8), math.nan))


def test_a_spent_budget_gives_the_smallest_set_so_far() -> None:
    torch.manual_seed(0)
    result = amp_fx.search(broken(), **F16, budget=3)(*TinyGPT.inputs())
    assert not result.is_minimal
    assert result.value <= 3e-2
    assert result.evaluations == 3
    assert "not shown to be minimal" in str(result)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).log1p()


def test_search_names_the_op_at_fault() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    inp, gate, out = nn.Linear(64, 64), Gate(), nn.Linear(64, 10)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out(gate(inp(x) * 1000)), y)

    result = amp_fx.search(step, tolerance=2e-2, dtype="float16")(x, y)
    assert "gate: pow" in map(str, result.units)
    assert result.value <= 2e-2
    tried = {e.units: e.is_enough for e in result.history}
    if not result.is_minimal:
        assert tried.get(("gate: pow",)) is not True
        assert any("gate: pow overflows" in note for note in result.notes)
