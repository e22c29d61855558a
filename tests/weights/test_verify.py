"""What nothing can notice: said aloud by ``verify="full"``, put right by ``invalidate``.

What the default, ``"sample"``, makes of such writes is in ``test_unseen_writes``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from amp_fx import weight_cache
from amp_fx.errors import StaleWeightError
from amp_fx.weights.entry import same_bits
from tests.weights.nets import Net, Weight, assert_same, autocast, compile_amp_fx, inputs, make_net

if TYPE_CHECKING:
    import numpy as np


def aliased() -> tuple[Net, np.ndarray]:
    """A model, and an array over its first weight that was taken before any call."""
    net = make_net()
    return net, net.a.weight.detach().numpy()


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
def test_verify_option() -> None:
    net, array = aliased()
    compiled = compile_amp_fx(net, verify="full")
    compiled(inputs())
    compiled(inputs())
    array *= 2
    advice = r"a\.weight of Net.*\(4, 4\).*amp_fx\.weight_cache\.invalidate\(\)"
    with pytest.raises(StaleWeightError, match=advice):
        compiled(inputs())
    weight_cache.invalidate(net)
    assert_same(compiled(inputs()), autocast(net, inputs()))


@torch.no_grad()
def test_verify_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_FX_VERIFY", "1")
    net, array = aliased()
    compiled = compile_amp_fx(net)
    compiled(inputs())
    array *= 2
    with pytest.raises(StaleWeightError):
        compiled(inputs())


@torch.no_grad()
def test_switched_off_nothing_is_compared() -> None:
    """If this fails, such writes are noticed after all: say so in the documentation."""
    net, array = aliased()
    compiled = compile_amp_fx(net, verify="off")
    before = compiled(inputs())
    array *= 2
    assert_same(compiled(inputs()), before)


@torch.no_grad()
def test_verify_tells_a_signed_zero_and_takes_nans() -> None:
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


def test_verify_trains() -> None:
    net, _ = aliased()
    compiled = compile_amp_fx(net, verify="full")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


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
