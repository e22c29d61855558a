"""Weights that move to other storages and back: no call computes with what they left."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

from amp_fx import weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from tests import needs
from tests.weights.keeping import (
    FROZEN,
    WAYS,
    Line,
    Way,
    batch,
    check,
    contents,
    make_line,
    num_alive,
    weak,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Weights = dict[int, torch.Tensor]
    Road = Callable[[Line, Weights], Any]

pytestmark = [pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")]
ALL_WAYS = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


# ------------------------------------------------------------------- roads to another storage

ROADS: dict[str, Road] = {}
"""By name; each gives some layers' weights other storages, which hold other contents."""


def _road(road: Road) -> Road:
    ROADS[road.__name__] = torch.no_grad()(road)
    return road


@_road
def data(model: Line, new: Weights) -> None:
    for i, weight in new.items():
        model.weight(i).data = weight


@_road
def tensor_set(model: Line, new: Weights) -> None:
    for i, weight in new.items():
        torch.Tensor.set_(model.weight(i), weight)  # type: ignore[call-overload]


@_road
def storage_set(model: Line, new: Weights) -> None:
    for i, weight in new.items():
        storage, start = weight.untyped_storage(), weight.storage_offset()
        model.weight(i).set_(storage, start, weight.shape, weight.stride())


@_road
def parameter(model: Line, new: Weights) -> None:
    for i, weight in new.items():
        model.layers[i].weight = nn.Parameter(weight)


@_road
def load_state_dict(model: Line, new: Weights) -> None:
    state = {f"layers.{i}.weight": nn.Parameter(weight) for i, weight in new.items()}
    model.load_state_dict(state, strict=False, assign=True)


@_road
def swap_tensors(model: Line, new: Weights) -> None:
    for i, weight in new.items():
        torch.utils.swap_tensors(model.weight(i), nn.Parameter(weight))  # type: ignore[no-untyped-call]


@_road
def vector_to_parameters(model: Line, new: Weights) -> None:
    vector = torch.cat([weight.reshape(-1) for weight in new.values()])
    nn.utils.vector_to_parameters(vector, [model.weight(i) for i in new])


@_road
def converted(model: Line, new: Weights) -> None:
    model.to(torch.float64)
    for i, weight in new.items():
        model.weight(i).data.copy_(weight)
    model.double().float()


# -------------------------------------------------------------------------- here and there


@dataclasses.dataclass(frozen=True)
class Turn:
    """Some weights move.

    Attributes:
        layers: Whose weights.
        road: How.
        version: Which contents, 0 being the first.
        is_new: Whether into storages that never were a weight's, else always the same ones.
        num_calls: Calls that follow.
    """

    layers: frozenset[int]
    road: str
    version: int
    is_new: bool = False
    num_calls: int = 1


turns = st.builds(
    Turn,
    st.frozensets(st.integers(0, 2), min_size=1),
    st.sampled_from(sorted(ROADS)),
    st.integers(0, 2),
    st.booleans(),
    st.integers(1, 3),
)
FIRST, MIDDLE, LAST, ALL = (frozenset(layers) for layers in ({0}, {1}, {2}, range(3)))


def there_and_back(road: str) -> list[Turn]:
    return [Turn(MIDDLE, road, v, num_calls=2) for v in (1, 2, 1, 2, 1)]


@ALL_WAYS
@settings(
    max_examples=8,
    phases=(Phase.explicit, Phase.generate),  # to shrink what compiles takes minutes
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example([Turn(LAST, "data", 1), Turn(LAST, "tensor_set", 0), Turn(LAST, "storage_set", 1)])
@example([Turn(ALL, "data", v, num_calls=2) for v in (1, 0, 1, 0)])
# That the first weight moves changes how values are found.
@example([Turn(layer, "data", v) for layer in (LAST, MIDDLE, FIRST) for v in 3 * (1, 0)])
@example([turn for road in ("data", "tensor_set") for turn in there_and_back(road)])
@example([turn for road in ("storage_set", "parameter") for turn in there_and_back(road)])
@example([turn for road in ("load_state_dict", "swap_tensors") for turn in there_and_back(road)])
@example([turn for road in ("vector_to_parameters", "converted") for turn in there_and_back(road)])
@given(st.lists(turns, min_size=3, max_size=10))
def test_any_turns(way: Way, sequence: list[Turn]) -> None:
    weight_cache.clear()
    (model, held), x = make_line(), batch()
    program = way.compile(model)  # all examples share the code
    if not way.keeps_values(program, x):
        torch._dynamo.reset()  # weights that change at every call are cast by their graph
        way.warm(program, x)
    storages = {(i, v): contents(10 * v + i) for i in range(3) for v in range(3)}
    for i in range(3):
        storages[i, 0] = model.weight(i).data
    for turn in sequence:
        for i in turn.layers:
            held[i] = contents(10 * turn.version + i)
        new = {i: storages[i, turn.version] for i in sorted(turn.layers)}
        if turn.is_new:
            new = {i: held[i].clone() for i in new}
        ROADS[turn.road](model, new)
        del new
        for _ in range(turn.num_calls):
            check(way, program, held, x)


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
        ROADS[("data", "parameter", "storage_set")[k // 3]](model, {1: held[1].clone()})
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
        ROADS[("data", "tensor_set")[k // 4 % 2]](model, new)
        assert is_kept_again(program, held, x, 6), f"after {k + 1} replacements"
