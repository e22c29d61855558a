"""Graphs whose weights are parts of a larger tensor, which is written where nothing sees it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_fx import weight_cache
from tests import needs
from tests.weights.alarms import alarms
from tests.weights.keeping import WAYS, Way, batch, check
from tests.weights.nets import Weight
from tests.weights.strided import STRIDED, read_by, whole_of

pytestmark = [needs.FROZEN_GRAPHS]

MATRICES = [kind for kind in STRIDED if STRIDED[kind](whole_of()).dim() == 2]


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    weight_cache.clear()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("kind", MATRICES)
def test_a_write_to_the_whole_weight_is_found_at_the_next_call(kind: str, way: Way) -> None:
    big = whole_of()
    array, is_read = big.numpy(), read_by(kind)
    model = Weight(torch.zeros(1))
    model.weight = nn.Parameter(STRIDED[kind](big))
    x = batch(model.weight.shape[1])
    program = way.compile(model)

    def check_now() -> None:
        held = STRIDED[kind](torch.from_numpy(array.copy())).clone()
        check(way, program, [held], x)

    way.warm(program, x)
    with alarms() as messages:
        array[~is_read] *= -2.0  # of which the weight has nothing
        for _ in range(4):
            check_now()
        assert not messages
        for factor in (-1.5, 2.0, -0.25):
            array[is_read] *= factor
            check_now()
    [message] = [each for each in messages if "PyTorch cannot see" in each]
    assert message.startswith("weight of Weight")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_write_that_torch_sees(way: Way) -> None:
    """By way of the larger tensor, whose storage is the weight's."""
    big = whole_of()
    model = Weight(torch.zeros(1))
    model.weight = nn.Parameter(big[::2, 5:45])
    x = batch(40)
    program = way.compile(model)
    way.warm(program, x)
    with alarms() as messages:
        for _ in range(4):
            big.mul_(-1.5)
            check(way, program, [big[::2, 5:45].clone()], x)
    assert not messages
