"""``amp_fx.audit`` with two processes: the dtypes in which collectives add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.distributed.spawn import run_ranks

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks("tests.audit.two_ranks", folder, 2)


def audits(ranks: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    found = [rank[case] for rank in ranks]
    return [audit for each in found for audit in (each if isinstance(each, list) else [each])]


LOW = {
    "ddp_compressed": ("float16", "torch.autograd.backward(loss)  # here"),
    "fsdp2_low": ("bfloat16", "torch.autograd.backward(loss)  # here"),
    "tensor_parallel_low": ("bfloat16", "loss = F.cross_entropy(model(x).float(), y)"),
}


@pytest.mark.parametrize("case", LOW)
def test_a_low_sum_is_found_at_its_line(ranks: list[dict[str, Any]], case: str) -> None:
    dtype, line = LOW[case]
    for audit in audits(ranks, case):
        [(kind, code, message)] = audit["found"]
        assert (kind, code) == ("reduction_low", line)
        assert f"of 2 ranks in {dtype}" in message
        assert dtype in audit["collectives"]


@pytest.mark.parametrize("case", ["ddp", "fsdp2", "tensor_parallel"])
def test_sums_in_float32_are_sound(ranks: list[dict[str, Any]], case: str) -> None:
    for audit in audits(ranks, case):
        assert audit["found"] == []
        assert "float32" in audit["collectives"]


def test_the_largest_element_is_exact(ranks: list[dict[str, Any]]) -> None:
    assert [rank["largest"] for rank in ranks] == [[], []]


@pytest.mark.parametrize("case", [*LOW, "ddp", "fsdp2", "tensor_parallel"])
def test_ranks_are_left_as_they_were(ranks: list[dict[str, Any]], case: str) -> None:
    for audit in audits(ranks, case):
        assert audit["is_same"]
        audited, after = audit["losses"]
        assert audited == after
