"""Storages that weights leave are freed."""

from __future__ import annotations

import pytest

from amp_fx import weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from tests.weights.keeping import WAYS, Way, batch, check, contents, make_line, num_alive, weak
from tests.weights.machine import ROADS

pytestmark = [pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")]
ALL_WAYS = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


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
