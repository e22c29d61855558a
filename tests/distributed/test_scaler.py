"""Ranks skip together and clip by one norm without being told, also in compiled steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

Ranks = list[dict[str, Any]]
CASES = [
    ("eager", "ddp"),
    *((step, how) for step in ("eager", "compiled") for how in ("fsdp2", "tensor parallel")),
    *((step, "pipeline") for step in ("eager", "compiled")),
]


@pytest.mark.parametrize(("step", "wrapper"), CASES)
def test_one_overflow_skips_the_step_of_all(ranks: Ranks, step: str, wrapper: str) -> None:
    for rank in ranks:
        found = rank["scaler"][step][wrapper]
        assert found["skipped"] == [False, True, False, False]
        assert found["scales"] == [2**16, 2**15, 2**15, 2**15]


@pytest.mark.parametrize(("step", "wrapper"), CASES)
def test_numbers_are_those_of_one_process(ranks: Ranks, step: str, wrapper: str) -> None:
    """Gradients are clipped by the norm of all, so that every parameter tells of it."""
    alone = ranks[0]["scaler"]["eager"]["alone"]
    finite = [0, 2, 3]
    trained = [p for rank in ranks for p in rank["scaler"][step][wrapper]["params"]]
    expected = alone["params"] * (len(trained) // len(alone["params"]))
    torch.testing.assert_close(trained, expected)
    for rank in ranks:
        norms = rank["scaler"][step][wrapper]["norms"]
        assert [norms[i] for i in finite] == pytest.approx([alone["norms"][i] for i in finite])
