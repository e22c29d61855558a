"""Several processes skip together, scales stay equal: gloo, two ranks, run once for all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_fx

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300  # seconds; a rank that waits for the other for ever fails the tests


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both found, see two_ranks.py."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    folder = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.grad_scaler.two_ranks", str(rank), str(folder)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_one_overflow_skips_the_step_of_all(
    ranks: list[dict[str, Any]], optimizer: str, clip: float | None
) -> None:
    for rank in ranks:
        (first, second, third) = rank["group"][optimizer, clip]
        assert torch.equal(first[0], second[0])  # parameters
        assert not torch.equal(second[0], third[0])
        assert [numbers[-1].item() for numbers in (first, second, third)] == [2**17, 2**16, 2**17]
        assert rank["group"][optimizer, clip, "skipped"] == [False, True, False]


def test_a_rank_without_gradients_takes_part(ranks: list[dict[str, Any]]) -> None:
    """Its scale moves as that of the other, and its parameters stay."""
    for rank, stays in zip(ranks, (False, True), strict=True):
        found = rank["without_gradients"]
        assert len(found) == 10
        for number, (call, scale, is_untouched) in enumerate(found):
            assert scale == (2**17, 2**16)[number % 2], call
            assert is_untouched == stays, call


@pytest.mark.parametrize("clip", [None, 0.5])
def test_dtensors_agree_by_themselves(ranks: list[dict[str, Any]], clip: float | None) -> None:
    """The same numbers as torch's scaler, which does so too, and as one process on its own."""
    for rank in ranks:
        ours, theirs, alone = (rank["spread"][name, clip] for name in ("ours", "torch", "alone"))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        torch.testing.assert_close(ours, alone)


def test_culprits_are_told_where_they_are(ranks: list[dict[str, Any]]) -> None:
    assert [rank["spread"]["culprits"] for rank in ranks] == [[], [(1, 4)]]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_wrapped_models_train_as_with_torch(ranks: list[dict[str, Any]], how: str) -> None:
    for rank in ranks:
        ours, theirs = (rank["wrapped"][how, name] for name in ("ours", "torch"))
        assert ours[-1] == 2**15
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(ranks[0]["wrapped"], ranks[1]["wrapped"])


def test_copies_keep_the_group_and_pickles_lose_it(ranks: list[dict[str, Any]]) -> None:
    assert [rank["copies"] for rank in ranks] == [[2**15], [2**15, 2**15]]


def test_what_is_no_process_group() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.distributed\.ProcessGroup"):
        amp_fx.GradScaler("cpu", process_group="world")  # type: ignore[arg-type]
