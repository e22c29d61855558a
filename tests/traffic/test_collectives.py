"""Bytes that a process hands to collectives, counted by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.passes.test_narrow_gathers import Building, c10d
from tests.traffic.collectives import collective_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)

GATHER, SCATTER = c10d.all_gather_into_tensor, c10d.reduce_scatter_tensor
COLLECTIVES: dict[str, tuple[int, Callable[[Building, fx.Node], fx.Node]]] = {
    "all_gather": (1, lambda b, x: b.op(GATHER.default, x, 4, "0")),
    "reduce_scatter": (1, lambda b, x: b.op(SCATTER.default, x, "sum", 4, "0")),
    "all_reduce": (1, lambda b, x: b.op(c10d.all_reduce.default, x, "sum", "0")),
    "all_reduce_": (1, lambda b, x: b.op(c10d.all_reduce_.default, x, "sum", "0")),
    "broadcast": (1, lambda b, x: b.op(c10d.broadcast.default, x, 0, "0")),
    "all_gather_coalesced": (
        2,
        lambda b, x: b.op(c10d.all_gather_into_tensor_coalesced.default, [x, x], 4, "0"),
    ),
    "reduce_scatter_coalesced": (
        2,
        lambda b, x: b.op(c10d.reduce_scatter_tensor_coalesced.default, [x, x], "sum", 4, "0"),
    ),
    "all_reduce_coalesced": (
        2,
        lambda b, x: b.op(c10d.all_reduce_coalesced.default, [x, x], "sum", "0"),
    ),
    "all_to_all": (1, lambda b, x: b.op(c10d.all_to_all_single.default, x, [16], [16], "0")),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_all_bytes_that_are_handed_over_count(name: str) -> None:
    times, make = COLLECTIVES[name]
    b = Building()
    graph = b.done(make(b, b.given("part", 16, 8))).graph
    assert collective_bytes(graph) == times * 16 * 8 * 4


def test_other_ops_hand_over_nothing() -> None:
    b = Building()
    low = b.cast(b.given("part", 16, 8))
    assert collective_bytes(b.done(b.gather(low)).graph) == 16 * 8 * 2
