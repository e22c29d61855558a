"""Writes that PyTorch cannot see: the warning, the levels of ``verify``, and no false alarms.

``test_cached_values`` compares results after such writes: those with the signal ``sample``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from amp_fx import weight_cache
from amp_fx.errors import StaleWeightError
from tests.weights.nets import (
    EVAL,
    SIZE,
    TRAIN,
    Graph,
    Weight,
    assert_same,
    autocast,
    compile_amp_fx,
    inputs,
    make_net,
    random,
)
from tests.weights.writes import WRITES

if TYPE_CHECKING:
    from collections.abc import Callable


class Named(nn.Module):
    """Two weights whose names no message holds by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(SIZE, SIZE)
        self.decoder = nn.Linear(SIZE, SIZE, bias=False)
        for i, parameter in enumerate(self.parameters()):
            parameter.data.copy_(random(*parameter.shape, seed=i))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.relu(self.encoder(x)))  # type: ignore[no-any-return]


class Scene:
    """A compiled model, its twin, and arrays over its weights from before the latest call."""

    def __init__(self, **options: Any) -> None:
        self.model, self.twin = Named(), Named()
        self.compiled = compile_amp_fx(self.model, **options)
        self.check(TRAIN, EVAL)
        weights = self.model.encoder.weight, self.model.decoder.weight
        self.encoder, self.decoder = (weight.detach().numpy() for weight in weights)
        self.check(TRAIN, EVAL, TRAIN, EVAL)

    def check(self, *graphs: Graph) -> None:
        """Calls the model once for each graph, and compares it with its twin."""
        for graph in graphs:
            graph.check(self.compiled, self.model, self.twin)

    def scale(self, factor: float, name: str = "encoder") -> None:
        """Multiplies a weight of the model unseen, and that of the twin."""
        array = getattr(self, name)
        np.multiply(array, factor, out=array)
        self.twin.get_parameter(f"{name}.weight").data.mul_(factor)


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("amp_fx")]


def assert_warns_of(caplog: pytest.LogCaptureFixture, *names: str) -> None:
    """Asserts that there is one warning for each of the weights, with the likely cause."""
    for message, name in zip(alarms(caplog), names, strict=True):
        assert [n for n in ("encoder", "decoder") if n in message] == [name]
        assert re.search("numpy|dlpack|pointer", message, re.IGNORECASE)


@pytest.mark.parametrize("graph", [TRAIN, EVAL], ids=lambda graph: graph.name)
def test_noticed_at_the_first_call(graph: Graph, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.scale(2.0)
    scene.check(graph)
    assert_warns_of(caplog, "encoder")


def test_another_weight_is_still_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    """A weight that is cast on every call hides no other one."""
    scene = Scene()
    for name in ("encoder", "decoder"):
        scene.scale(2.0, name)
        scene.check(EVAL, EVAL)
    assert_warns_of(caplog, "encoder", "decoder")


def test_right_and_silent_ever_after(caplog: pytest.LogCaptureFixture) -> None:
    """The weight is cast on every call from then on, so that no sample need hit."""
    scene = Scene()
    for factor in (2.0, -1.5, 0.25, 3.0):
        scene.scale(factor)
        scene.check(EVAL, TRAIN, EVAL)
    for i in range(SIZE * SIZE):
        scene.encoder.reshape(-1)[i] = 7.0 + i
        scene.twin.encoder.weight.data.view(-1)[i] = 7.0 + i
        scene.check(EVAL)
    assert_warns_of(caplog, "encoder")


@torch.no_grad()
def test_a_second_graph_learns_of_it_too(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    other = compile_amp_fx(scene.model.encoder)
    for _ in range(2):
        assert_same(other(inputs()), autocast(scene.twin.encoder, inputs()))
    scene.scale(2.0)
    assert_same(other(inputs()), autocast(scene.twin.encoder, inputs()))
    scene.check(EVAL)
    for model in (scene.model, scene.twin):
        model.encoder.weight.data[0, 0] = 9.0  # a change that sampling would miss mostly
    scene.check(EVAL)
    assert_warns_of(caplog, "encoder")


@torch.no_grad()
@pytest.mark.parametrize("verify", ["full", True])
def test_full_raises_for_one_element_with_advice_that_helps(verify: Any) -> None:
    net = make_net()
    array = net.a.weight.detach().numpy()
    compiled = compile_amp_fx(net, verify=verify)
    compiled(inputs())
    compiled(inputs())
    advice = r"a\.weight of Net.*\(4, 4\).*amp_fx\.weight_cache\.invalidate\(\)"
    for target in (net, net.a.weight, None):
        array[2, 3] *= 2
        with pytest.raises(StaleWeightError, match=advice):
            compiled(inputs())
        weight_cache.invalidate(target)
        assert_same(compiled(inputs()), autocast(net, inputs()))


@torch.no_grad()
def test_full_tells_a_signed_zero_and_takes_nans() -> None:
    model = Weight(torch.zeros(4, 4))
    array = model.weight.numpy()
    compiled = compile_amp_fx(model, verify="full")
    model.weight[0, 0] = float("nan")
    compiled(inputs())
    compiled(inputs())
    model.weight.numpy()  # noticed: the next call arms the weight again
    compiled(inputs())
    array[1, 1] = -0.0
    with pytest.raises(StaleWeightError):
        compiled(inputs())


@torch.no_grad()
@pytest.mark.parametrize("verify", ["off", False])
def test_off_is_silently_stale(verify: Any, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(verify=verify)
    before = scene.compiled(inputs())
    scene.scale(2.0)
    assert_same(scene.compiled(inputs()), before)
    assert not alarms(caplog)


SEEN = ("mul_", "data_copy_", "foreach_copy_", "data_replaced", "load_state_dict", "numpy_of_data")


def fill(value: float) -> Callable[[Any], Any]:
    return lambda net: lambda _: net.a.weight.data.fill_(value)


@pytest.mark.parametrize(
    "write",
    [
        *(pytest.param(WRITES[name], id=name) for name in SEEN),
        *(pytest.param(fill(x), id=str(x)) for x in (torch.nan, torch.inf, -0.0, 1e38, 1e-44)),
    ],
)
@pytest.mark.parametrize("verify", ["sample", "full"])
def test_no_alarm(verify: str, write: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Where PyTorch sees the write, and of odd numbers."""
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net, verify=verify)
    steps = write(net), write(twin)
    for i in range(4):
        for graph in (TRAIN, EVAL):
            graph.check(compiled, net, twin)
        for step in steps:
            step(i)
    assert not alarms(caplog)
