"""Weights that move to other storages and back: no call computes with what they left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_fx import weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from tests import needs
from tests.weights.keeping import (
    FROZEN,
    WAYS,
    Way,
    batch,
    check,
    contents,
    make_line,
    num_alive,
    weak,
)
from tests.weights.machine import ROADS

pytestmark = [pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")]
ALL_WAYS = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


# -------------------------------------------------------------------- what was left is freed


@ALL_WAYS
def test_what_weights_leave_is_freed(way: Way) -> None:
    (model, held), x = make_line(), batch()
    program = way.compile(model)
    way.warm(program, x)
    size = weight_cache.stats().bytes
    left = [weak(model.weight(1))]
    for k in range(9):
        held[1] = contents(30 + k)
        road = ROADS[("data", "parameter", "storage_set")[k // 3]]
        road(model, {"layers.1.weight": held[1].clone()})
        left.append(weak(model.weight(1)))
        model.zero_grad()
        for _ in range((1, 3)[k % 2]):
            check(way, program, held, x)
    assert num_alive(left[:-1]) <= 1, "all but the current one are freed, and at most one more"
    assert weight_cache.stats().bytes <= 2 * size
    weight_cache.clear()
    assert num_alive(left[:-1]) == 0, "clear lets go of all that weights left"
    assert num_alive(left) == 1
    check(way, program, held, x)


@ALL_WAYS
def test_two_storages_by_turns_are_all_that_lives(way: Way) -> None:
    (model, held), x = make_line(), batch()
    program = way.compile(model)
    way.warm(program, x)
    mine, other = held[1].clone(), contents(7)
    storages = [weak(mine), weak(other)]
    for k in range(6):
        model.weight(1).data = (other, mine)[k % 2]
        held[1] = model.weight(1).data.clone()
        check(way, program, held, x)
    del mine, other
    model.weight(1).data = contents(8)
    held[1] = contents(8)
    for _ in range(3):
        check(way, program, held, x)
    assert num_alive(storages) <= 1
    weight_cache.clear()
    assert num_alive(storages) == 0


# ----------------------------------------------------------------------------- swaps by torch


@ALL_WAYS
def test_converted_by_swaps(way: Way) -> None:
    (model, held), x = make_line(), batch()
    program = way.compile(model)
    way.warm(program, x)
    was_on = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.zero_grad()
        model.double()
        with torch.no_grad():
            model.weight(1).mul_(-4)
        model.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was_on)
    held[1] = held[1] * -4
    for _ in range(3):
        check(way, program, held, x)


# -------------------------------------------------------------------- frozen again, after all


def is_kept_again(program: Any, held: list[torch.Tensor], x: torch.Tensor, num_calls: int) -> bool:
    """Calls, and tells whether a frozen graph then keeps values that calls find."""
    for _ in range(num_calls):
        check(FROZEN, program, held, x)
    before = weight_cache.stats().hits
    for _ in range(5):
        check(FROZEN, program, held, x)
    stats = weight_cache.stats()
    return bool(stats.values) and stats.hits > before


@needs.FROZEN_GRAPHS
def test_weights_left_alone_are_frozen_again_each_time() -> None:
    (model, held), x = make_line(), batch()
    program = FROZEN.compile(model)
    for num_updates, layers in ((5, range(3)), (20, range(3)), (5, [1]), (5, [1])):
        for _ in range(num_updates):
            for i in layers:
                model.weight(i).data.mul_(-1.0)
                held[i] = -held[i]
            check(FROZEN, program, held, x)
        assert is_kept_again(program, held, x, 40)


@needs.FROZEN_GRAPHS
def test_data_replaced_at_every_eleventh_call_is_not_given_up() -> None:
    (model, held), x = make_line(), batch()
    program = FROZEN.compile(model)
    FROZEN.warm(program, x)
    for k, layers in enumerate((*8 * ([1],), *8 * (range(3),))):
        new = {i: contents(50 + 10 * k + i) for i in layers}
        for i, weight in new.items():
            held[i] = weight.clone()
        named = {f"layers.{i}.weight": weight for i, weight in new.items()}
        ROADS[("data", "tensor_set")[k // 4 % 2]](model, named)
        assert is_kept_again(program, held, x, 6), f"after {k + 1} replacements"
