"""Float8 policies where FSDP2 or tensor parallelism shards weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.float8.torchao_oracle import RECIPES

pytest.importorskip("torchao", reason="the oracle is torchao 0.18")
pytestmark = pytest.mark.slow

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What both ranks found, by the name of the case."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    return run_ranks("tests.distributed.float8_ranks", tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize("gathers", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_fsdp2_has_the_numbers_of_one_process(
    ranks: Ranks, gathers: str, is_compiled: bool
) -> None:
    for rank in ranks:
        found = rank["float8_fsdp2"]
        same_losses, same_weights, num_products = found[gathers, is_compiled]
        assert same_losses
        assert same_weights
        assert (num_products > 0) is is_compiled
        assert found["plain"], "float8 has other numbers than bfloat16"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_tensor_parallelism_has_the_bits_of_torchao(ranks: Ranks, recipe: str, how: str) -> None:
    for rank in ranks:
        assert rank["float8_tensor_parallel"][recipe, how] == []


def test_each_process_needs_a_part_that_fits(ranks: Ranks) -> None:
    for rank in ranks:
        found = rank["float8_tensor_parallel"]
        by_columns, by_rows = found["why", 48]
        assert "its 24 outputs are not a multiple of 16" in by_columns
        assert "its 24 inputs are not a multiple of 16" in by_rows
        assert "the shards of the weight have different sizes" in found["why", 49][0]
