"""What ranks send, against rings that are played through chunk by chunk."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx.graphs.collectives import collectives_in
from tests.passes.test_narrow_gathers import Building, c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import fx

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)

RANKS = 4


@pytest.fixture
def _ranks() -> Iterator[None]:
    """This process as the third of four, of which the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=2, world_size=RANKS, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


class Ring:
    """Ranks that hand chunks to the next one, and count what they send."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.sent: Counter[int] = Counter()

    def hand_on(self, chunks: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Each rank's chunk with its size goes to the next rank."""
        for rank, (size, _) in enumerate(chunks):
            self.sent[rank] += size
        return chunks[-1:] + chunks[:-1]

    def all_gather(self, size: int) -> int:
        have = [{rank} for rank in range(self.num_ranks)]
        chunks: list[tuple[int, Any]] = [(size, rank) for rank in range(self.num_ranks)]
        while any(len(each) < self.num_ranks for each in have):
            chunks = self.hand_on(chunks)
            for each, (_, chunk) in zip(have, chunks, strict=True):
                each.add(chunk)
        return self.sent[0]

    def reduce_scatter(self, size: int) -> int:
        own = size // self.num_ranks
        chunks: list[tuple[int, Any]] = [(own, {rank}) for rank in range(self.num_ranks)]
        while len(chunks[0][1]) < self.num_ranks:  # every chunk is a sum of some ranks
            passed = self.hand_on(chunks)
            chunks = [(own, ranks | {rank}) for rank, (_, ranks) in enumerate(passed)]
        return self.sent[0]

    def all_reduce(self, size: int) -> int:
        self.reduce_scatter(size)
        return self.all_gather(size // self.num_ranks)


GATHER, SCATTER = c10d.all_gather_into_tensor, c10d.reduce_scatter_tensor
COLLECTIVES: dict[
    str, tuple[Callable[[Building, fx.Node], fx.Node], Callable[[Ring, int], int]]
] = {
    "all_gather_into_tensor": (lambda b, x: b.op(GATHER.default, x, RANKS, "0"), Ring.all_gather),
    "reduce_scatter_tensor": (
        lambda b, x: b.op(SCATTER.default, x, "sum", RANKS, "0"),
        Ring.reduce_scatter,
    ),
    "all_reduce": (lambda b, x: b.op(c10d.all_reduce.default, x, "sum", "0"), Ring.all_reduce),
    "all_reduce_": (lambda b, x: b.op(c10d.all_reduce_.default, x, "sum", "0"), Ring.all_reduce),
    "broadcast": (lambda b, x: b.op(c10d.broadcast.default, x, 0, "0"), lambda _, size: size),
    "all_gather_into_tensor_coalesced": (
        lambda b, x: b.op(c10d.all_gather_into_tensor_coalesced.default, [x, x], RANKS, "0"),
        lambda ring, size: ring.all_gather(2 * size),
    ),
    "reduce_scatter_tensor_coalesced": (
        lambda b, x: b.op(c10d.reduce_scatter_tensor_coalesced.default, [x, x], "sum", RANKS, "0"),
        lambda ring, size: ring.reduce_scatter(2 * size),
    ),
    "all_reduce_coalesced": (
        lambda b, x: b.op(c10d.all_reduce_coalesced.default, [x, x], "sum", "0"),
        lambda ring, size: ring.all_reduce(2 * size),
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.usefixtures("_ranks")
def test_what_is_sent_is_what_a_ring_sends(name: str) -> None:
    make, play = COLLECTIVES[name]
    b = Building()
    [found] = collectives_in(b.done(make(b, b.given("part", 16, 8))).graph)
    times = 2 if name.endswith("coalesced") else 1
    assert (found.op, found.dtype, found.group_size) == (name, torch.float32, RANKS)
    assert found.num_bytes == times * 16 * 8 * 4
    assert found.wire_bytes == play(Ring(RANKS), 16 * 8 * 4)


@pytest.mark.usefixtures("_ranks")
def test_an_all_to_all_keeps_what_is_for_itself() -> None:
    """This is rank 2: of ten rows it sends all but its three; all of a permutation."""
    b = Building()
    x = b.given("part", 10, 8, dtype=torch.bfloat16)
    swap = b.op(c10d.all_to_all_single.default, x, [1, 2, 3, 4], [1, 2, 3, 4], "0")
    shift = b.op(c10d.all_to_all_single.default, x, [0, 10, 0, 0], [0, 0, 0, 10], "0")
    found = list(collectives_in(b.done(swap, shift).graph))
    assert [each.wire_bytes for each in found] == [7 * 8 * 2, 10 * 8 * 2]
    assert [each.num_bytes for each in found] == [10 * 8 * 2] * 2


def test_a_group_that_is_not_known() -> None:
    b = Building()
    x = b.given("part", 16, 8)
    reduced = b.op(c10d.all_reduce.default, x, "sum", "0")
    gathered = b.op(GATHER.default, x, 2, "0")
    first, second = collectives_in(b.done(reduced, gathered).graph)
    assert (first.group_size, first.wire_bytes) == (0, 16 * 8 * 4)
    assert (second.group_size, second.wire_bytes) == (2, 16 * 8 * 4)
