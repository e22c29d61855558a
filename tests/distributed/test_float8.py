"""Float8 policies where FSDP2 shards weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.spawn import run_ranks

pytest.importorskip("torchao", reason="the oracle is torchao 0.18")
pytestmark = pytest.mark.slow

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Returns the results of both ranks, by the name of the case."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    return run_ranks("tests.distributed.float8_ranks", tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize("gathers", ["float32", "bfloat16"])
def test_fsdp2_has_the_numbers_of_one_process(ranks: Ranks, gathers: str) -> None:
    for rank in ranks:
        found = rank["float8_fsdp2"]
        same_losses, same_weights, num_products = found[gathers]
        assert same_losses
        assert same_weights
        assert num_products > 0
        assert found["plain"], "float8 has other numbers than bfloat16"
