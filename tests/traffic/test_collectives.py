"""Bytes that a process hands to collectives, counted by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.passes.test_narrow_gathers import c10d, gather
from tests.traffic.collectives import collective_bytes
from tests.weights.aot_graphs import traced

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)

PART = torch.randn(16, 8)
COLLECTIVES: dict[str, tuple[int, Callable[[torch.Tensor], Any]]] = {
    "all_gather": (1, lambda x: c10d.all_gather_into_tensor(x, 4, "0")),
    "reduce_scatter": (1, lambda x: c10d.reduce_scatter_tensor(x, "sum", 4, "0")),
    "all_reduce": (1, lambda x: c10d.all_reduce(x, "sum", "0")),
    "all_reduce_": (1, lambda x: c10d.all_reduce_(x, "sum", "0")),
    "broadcast": (1, lambda x: c10d.broadcast(x, 0, "0")),
    "all_gather_coalesced": (2, lambda x: c10d.all_gather_into_tensor_coalesced([x, x], 4, "0")),
    "reduce_scatter_coalesced": (
        2,
        lambda x: c10d.reduce_scatter_tensor_coalesced([x, x], "sum", 4, "0"),
    ),
    "all_reduce_coalesced": (2, lambda x: c10d.all_reduce_coalesced([x, x], "sum", "0")),
    "all_to_all": (1, lambda x: c10d.all_to_all_single(x, [16], [16], "0")),
}


@pytest.mark.parametrize(("times", "collective"), COLLECTIVES.values(), ids=COLLECTIVES)
def test_all_bytes_that_are_handed_over_count(times: int, collective: Any) -> None:
    assert collective_bytes(traced(collective, PART).graph) == times * 16 * 8 * 4


def test_other_ops_hand_over_nothing() -> None:
    graph = traced(lambda part: gather(part.bfloat16()), PART).graph
    assert collective_bytes(graph) == 16 * 8 * 2
