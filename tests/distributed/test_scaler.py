"""Ranks skip together and clip by one norm without any setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

Ranks = list[dict[str, Any]]
WRAPPERS = ("ddp", "fsdp2", "tensor parallel")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_one_overflow_skips_the_step_of_all(ranks: Ranks, wrapper: str) -> None:
    for rank in ranks:
        assert rank["scaler"]["eager"][wrapper]["scales"] == [2**16, 2**15, 2**15, 2**15]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_numbers_are_those_of_one_process(ranks: Ranks, wrapper: str) -> None:
    """Compares parameters after clipping by the global norm, which affects all of them."""
    alone = ranks[0]["scaler"]["eager"]["alone"]
    finite = [0, 2, 3]
    for rank in ranks:
        found = rank["scaler"]["eager"][wrapper]
        torch.testing.assert_close(found["params"], alone["params"])
        norms = found["norms"]
        assert [norms[i] for i in finite] == pytest.approx([alone["norms"][i] for i in finite])


@pytest.mark.parametrize("wrapper", ["alone", "ddp", "fsdp2"])
def test_eager_steps_have_the_bits_of_torchs_scaler(ranks: Ranks, wrapper: str) -> None:
    for rank in ranks:
        ours, theirs = (rank["scaler"][step][wrapper] for step in ("eager", "torch"))
        assert ours["scales"] == theirs["scales"]
        torch.testing.assert_close(ours["params"], theirs["params"], rtol=0, atol=0)


@pytest.mark.parametrize("wrapper", ["fsdp2", "tensor parallel"])
def test_parameters_are_named_where_they_overflowed(ranks: Ranks, wrapper: str) -> None:
    found = [rank["scaler"]["eager"][wrapper]["culprits"] for rank in ranks]
    assert found == [[0, 0, 0, 0], [0, 1, 0, 0]]
