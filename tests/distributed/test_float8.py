"""Float8 policies where FSDP2 or tensor parallelism shards weights."""

from __future__ import annotations

from typing import Any

import pytest

Ranks = list[dict[str, Any]]


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


def test_weights_that_are_dtensors_stay_in_the_low_dtype(ranks: Ranks) -> None:
    for rank in ranks:
        found = rank["float8_tensor_parallel"]
        assert found["eager"] == found["compiled"] == found["plain"]
        assert any("the weight is a DTensor" in reason for reason in found["why"])
