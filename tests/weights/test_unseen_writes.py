"""Writes that nothing in PyTorch can see, through memory that was shared before the latest call."""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from amp_fx import weight_cache
from amp_fx.errors import StaleWeightError
from amp_fx.weights.cache_entry import same_bits
from tests.weights.alarms import alarms
from tests.weights.nets import (
    EVAL,
    SIZE,
    TRAIN,
    Graph,
    Net,
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

    Scale = Callable[[float], Any]


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


def by_array(weight: torch.Tensor) -> Scale:
    array = weight.detach().numpy()
    return lambda factor: np.multiply(array, factor, out=array)


def by_dlpack(weight: torch.Tensor) -> Scale:
    """The alias is a tensor of torch, but its storage is another."""
    return from_dlpack(weight.detach()).mul_


def by_pointer(weight: torch.Tensor) -> Scale:
    pointer = ctypes.cast(weight.data_ptr(), ctypes.POINTER(ctypes.c_float))

    def scale(factor: float) -> None:
        for i in range(SIZE * SIZE):
            pointer[i] *= factor

    return scale


ALIASES = {f.__name__: f for f in (by_array, by_dlpack, by_pointer)}


def prepared(
    alias: str = "by_array", **options: Any
) -> tuple[Callable[..., torch.Tensor], Named, Named, Scale]:
    """Returns a compiled model, its twin, and a write that was prepared between two calls."""
    model, twin = Named(), Named()
    compiled = compile_amp_fx(model, **options)
    for graph in (TRAIN, EVAL):
        graph.check(compiled, model, twin)
    write = ALIASES[alias](model.encoder.weight)
    for graph in (TRAIN, EVAL, TRAIN, EVAL):
        graph.check(compiled, model, twin)

    def scale(factor: float) -> None:
        write(factor)
        twin.encoder.weight.data.mul_(factor)

    return compiled, model, twin, scale


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("graph", [TRAIN, EVAL], ids=lambda graph: graph.name)
def test_noticed_at_the_first_call(alias: str, graph: Graph) -> None:
    compiled, model, twin, scale = prepared(alias)
    with alarms() as messages:
        scale(2.0)
        graph.check(compiled, model, twin)
    assert_names_the_encoder(messages)


def assert_names_the_encoder(messages: list[str]) -> None:
    assert len(messages) == 1
    assert "encoder" in messages[0]
    assert "decoder" not in messages[0]
    assert re.search("numpy|dlpack|pointer", messages[0], re.IGNORECASE), "the likely cause"


def test_another_weight_is_still_looked_at() -> None:
    """A weight that is cast on every call hides no other one."""
    compiled, model, twin, scale = prepared()
    array = model.decoder.weight.detach().numpy()
    EVAL.check(compiled, model, twin)
    scale(2.0)
    with alarms():
        EVAL.check(compiled, model, twin)
    EVAL.check(compiled, model, twin)
    np.multiply(array, 2.0, out=array)
    twin.decoder.weight.data.mul_(2.0)
    with alarms() as messages:
        EVAL.check(compiled, model, twin)
    assert len(messages) == 1
    assert "decoder" in messages[0]


def test_right_and_silent_ever_after() -> None:
    """The weight is cast on every call from then on, so that no sample need hit."""
    compiled, model, twin, scale = prepared()
    pointer = ctypes.cast(model.encoder.weight.data_ptr(), ctypes.POINTER(ctypes.c_float))
    with alarms() as messages:
        for factor in (2.0, -1.5, 0.25, 3.0):
            scale(factor)
            for graph in (EVAL, TRAIN, EVAL):
                graph.check(compiled, model, twin)
        for i in range(SIZE * SIZE):
            pointer[i] = 7.0 + i
            twin.encoder.weight.data.view(-1)[i] = 7.0 + i
            EVAL.check(compiled, model, twin)
    assert_names_the_encoder(messages)


def test_a_second_graph_learns_of_it_too() -> None:
    compiled, model, twin, scale = prepared()
    other = compile_amp_fx(model.encoder)
    with torch.no_grad(), alarms() as messages:
        for _ in range(2):
            assert_same(other(inputs()), autocast(twin.encoder, inputs()))
        scale(2.0)
        assert_same(other(inputs()), autocast(twin.encoder, inputs()))
        EVAL.check(compiled, model, twin)
        model.encoder.weight.data[0, 0] = 9.0  # a change that sampling would miss mostly
        twin.encoder.weight.data[0, 0] = 9.0
        EVAL.check(compiled, model, twin)
    assert_names_the_encoder(messages)


@torch.no_grad()
def test_a_write_of_a_part_is_noticed_sooner_or_later() -> None:
    """Each call looks at other places: the chance to miss a quarter 200 times is 1e-25."""
    model, twin = Named(), Named()
    compiled = compile_amp_fx(model)
    compiled(inputs())
    array = model.encoder.weight.detach().numpy()
    compiled(inputs())
    with alarms() as messages:
        array[1] *= 2
        twin.encoder.weight.data[1] *= 2
        expected = autocast(twin, inputs())
        assert any(torch.equal(compiled(inputs()), expected) for _ in range(200))
        EVAL.check(compiled, model, twin)
    assert_names_the_encoder(messages)


def aliased() -> tuple[Net, np.ndarray]:
    """Returns a model, and an array over its first weight that was taken before any call."""
    net = make_net()
    return net, net.a.weight.detach().numpy()


@torch.no_grad()
@pytest.mark.parametrize("verify", ["full", True])
def test_full_raises_for_one_element_with_advice_that_helps(verify: Any) -> None:
    net, array = aliased()
    compiled = compile_amp_fx(net, verify=verify)
    compiled(inputs())
    compiled(inputs())
    array[2, 3] *= 2
    advice = r"a\.weight of Net.*\(4, 4\).*amp_fx\.weight_cache\.invalidate\(\)"
    with pytest.raises(StaleWeightError, match=advice):
        compiled(inputs())
    weight_cache.invalidate(net)
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
def test_invalidate_after_a_write_through_an_earlier_array() -> None:
    net, array = aliased()
    compiled = compile_amp_fx(net, verify="off")
    compiled(inputs())
    for target in (net, net.a.weight, None):
        array *= 2
        weight_cache.invalidate(target)
        assert_same(compiled(inputs()), autocast(net, inputs()))


@torch.no_grad()
@pytest.mark.parametrize("verify", ["off", False])
def test_off_is_silently_stale(verify: Any) -> None:
    compiled, _, _, scale = prepared(verify=verify)
    before = compiled(inputs())
    with alarms() as messages:
        scale(2.0)
        assert_same(compiled(inputs()), before)
    assert not messages


SEEN = ("mul_", "data_copy_", "foreach_copy_", "data_replaced", "load_state_dict", "numpy_of_data")


@pytest.mark.parametrize("write", SEEN)
def test_no_alarm_where_torch_sees_the_write(write: str) -> None:
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    steps = WRITES[write](net), WRITES[write](twin)
    with alarms() as messages:
        for i in range(5):
            for graph in (TRAIN, EVAL):
                graph.check(compiled, net, twin)
            for step in steps:
                step(i)
    assert not messages


@torch.no_grad()
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e38, 1e-44])
def test_no_alarm_for_odd_numbers(value: float) -> None:
    model, twin = Named(), Named()
    for one in (model, twin):
        one.encoder.weight.data.fill_(value)
    compiled = compile_amp_fx(model)
    with alarms() as messages:
        for _ in range(5):
            assert_same(compiled(inputs()), autocast(twin, inputs()))
    assert not messages


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_no_alarm_in_training(verify: str) -> None:
    model, twin = Named(), Named()
    compiled = compile_amp_fx(model, verify=verify)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (model, twin)]
    with alarms() as messages:
        for _ in range(10):
            compiled(inputs()).square().mean().backward()  # type: ignore[no-untyped-call]
            autocast(twin, inputs()).square().mean().backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            EVAL.check(compiled, model, twin)
    assert not messages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_same_bits_tells_zeros_apart_and_not_nans(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, float("nan"), 1.0], dtype=dtype)
    assert same_bits(values, values.clone())
    assert not same_bits(values, torch.tensor([-0.0, float("nan"), 1.0], dtype=dtype))


def test_same_bits_takes_whatever_can_be_kept() -> None:
    assert same_bits(torch.tensor(1.5), torch.tensor(1.5))
    strided = torch.ones(4, 6)[:, ::2]
    assert same_bits(strided, strided)
    assert same_bits(strided.t(), strided.t())
    packed = torch.ones(4, 4).to_mkldnn()
    assert same_bits(packed, torch.ones(4, 4).to_mkldnn())
    assert same_bits((strided, packed), (strided, packed))
    assert not same_bits((strided, strided), (strided,))
    assert not same_bits(strided, strided.bfloat16())
