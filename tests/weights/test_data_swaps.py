"""Storages that weights leave are freed."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from amp_fx import weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from tests.weights.keeping import WAYS, Line, Way, batch, contents
from tests.weights.machine import ROADS

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = [pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")]


def num_alive(storages: Iterable[StorageWeakRef]) -> int:
    """Returns the number of storages that have not been freed."""
    gc.collect()
    return sum(not storage.expired() for storage in storages)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_what_weights_leave_is_freed(way: Way) -> None:
    model, x = Line(), batch()
    program = way.compile(model)
    way.warm(program, x)
    size = weight_cache.stats().bytes
    left = []
    for k in range(9):
        road = ROADS[("data", "parameter", "storage_set")[k // 3]]
        road(model, {"1.weight": contents(30 + k)})
        left.append(StorageWeakRef(model.weight(1).untyped_storage()))  # type: ignore[no-untyped-call]
        for _ in range((1, 3)[k % 2]):
            way.check(program, model, x)
    assert num_alive(left[:-1]) <= 1, "all but the current one are freed, and at most one more"
    assert weight_cache.stats().bytes <= 2 * size
    weight_cache.clear()
    assert num_alive(left[:-1]) == 0, "clear lets go of all that weights left"
    assert num_alive(left) == 1
    way.check(program, model, x)
