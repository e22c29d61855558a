"""Casts of weights are kept in distributed programs, and those that a library shards are not.

The oracle is eager autocast in the same wrapper: all losses have the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import needs
from tests.distributed.nets import NUM_BLOCKS, NUM_CASTS, NUM_UPDATES

Ranks = list[dict[str, Any]]


def find(rank: dict[str, Any], path: str) -> dict[str, Any]:
    found = rank
    for name in path.split("."):
        found = found[name]
    return found


@pytest.mark.parametrize(
    "case",
    [
        "inside.each",
        "inside.no_sync",
        "outside.parts",
        "outside.whole",
        "options_of_ddp.static",
        "options_of_ddp.unused",
        "checkpointed",
        "local_sgd",
        "tensor_parallel",
    ],
)
def test_every_cast_is_kept_and_made_once_per_update(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        found = find(rank, case)
        assert found["ours"] == found["eager"]
        assert found["kept"] == NUM_CASTS
        assert found["made"] == NUM_CASTS * NUM_UPDATES


def test_casts_are_right_where_threads_of_torch_write_weights(ranks: Ranks) -> None:
    """ZeRO broadcasts without waiting: steps this short end before the write is trusted."""
    for rank in ranks:
        assert rank["zero"]["ours"] == rank["zero"]["eager"]


def test_parts_of_a_graph_keep_their_casts(ranks: Ranks) -> None:
    """Checks that ``DDPOptimizer`` split the graph, without which the case tests nothing."""
    assert all(rank["outside"]["parts"]["graphs"] > 1 for rank in ranks)


def test_stages_of_a_pipeline_keep_their_casts(ranks: Ranks) -> None:
    for rank in ranks:
        found = rank["pipeline"]
        assert found["ours"] == found["eager"]
        assert found["kept"] == NUM_CASTS // 2  # of one block, and the first layer or the last
        assert found["made"] == 3 * NUM_CASTS // 2  # 3 updates, of 4 micro-batches each
    assert ranks[1]["pipeline"]["ours"]  # the last stage has the losses


def test_collectives_into_weights_are_seen(ranks: Ranks) -> None:
    for number, rank in enumerate(ranks):
        for name, (is_same, num_made) in rank["collectives"].items():
            assert is_same, name
            sends = name == "point to point" and number == 0  # and writes nothing
            assert sends or num_made == NUM_CASTS, name


def test_checkpoints_load_with_and_without(ranks: Ranks) -> None:
    assert [rank["saved"] for rank in ranks] == [[True, True]] * 2


@pytest.mark.parametrize("case", ["fsdp2", "replicated", "fsdp1", "watched_first"])
def test_nothing_is_kept_of_sharded_weights(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        assert rank[case]["ours"] == rank[case]["eager"]
        assert rank[case]["kept"] == 0


def test_weights_are_let_go_when_they_are_sharded(ranks: Ranks) -> None:
    assert all(rank["watched_first"]["before"] == 4 * NUM_BLOCKS for rank in ranks)


def test_code_that_plain_and_sharded_modules_share_keeps_the_plain_ones(ranks: Ranks) -> None:
    for rank in ranks:
        found = rank["shared_code"]
        assert found["ours"] == found["eager"]
        assert found["kept"] == 4 * NUM_BLOCKS  # of one model
        assert found["made"] == 4 * NUM_BLOCKS * NUM_UPDATES


def test_arguments_and_partitioned_parameters_are_not_kept(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["arguments"] == 0
        assert rank["deepspeed"] == 0


@needs.FROZEN_GRAPHS
def test_sharded_weights_are_not_frozen(ranks: Ranks) -> None:
    for rank in ranks:
        assert min(rank["frozen"]["plain"]) > 0
        assert rank["frozen"]["sharded"] == (0, 0)


def test_writes_to_spread_weights_are_seen(ranks: Ranks) -> None:
    """Blocks of two layers each, whose weights (not biases) are written."""
    for rank in ranks:
        found = rank["tensor_parallel"]
        for name in ("in place", "data", "list", "part", "asked for"):
            assert found[name] == (True, 2 * NUM_BLOCKS), name
        assert found["none"] == (True, 0)


def test_what_is_said_of_a_dtensor_is_said_of_its_part(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["stand_in"] == (True, False)
