"""Tests that take minutes or need more than two ranks: ``make slow ARGS=tests/distributed``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.distributed.spawn import ROOT, TIMEOUT, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def difference(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def test_inductor_is_as_near_to_eager_as_without(tmp_path: Path) -> None:
    for rank in run_ranks("tests.distributed.sharded_cases", tmp_path, 2, "inductor"):
        for wrapper, losses in rank["inductor"].items():
            ours = difference(losses["ours"], losses["eager"])
            native = difference(losses["native"], losses["eager"])
            assert ours <= 1.1 * native, wrapper


def test_four_ranks_keep_nothing_and_have_the_same_bits(tmp_path: Path) -> None:
    for rank in run_ranks("tests.distributed.sharded_cases", tmp_path, 4, "hybrid", "both"):
        for case in ("hybrid", "both"):
            assert rank[case]["ours"] == rank[case]["eager"]
            assert rank[case]["kept"] == 0


def test_a_rank_that_dies_is_an_error_of_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"step raised .*[Cc]onnection"):
        run_ranks("tests.distributed.scaler_cases", tmp_path, 2, "step_alone")


@pytest.mark.parametrize("wrapper", ["ddp", "zero", "fsdp2", "tensor-parallel"])
def test_the_example_runs_as_shown(wrapper: str) -> None:
    """Runs the example, which fails if its losses differ from those of eager autocast."""
    page = (ROOT / "docs" / "recipes" / "distributed.md").read_text(encoding="utf-8")
    [command] = re.findall(r"torchrun (.*train_distributed\.py) --wrapper", page)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split(), "--wrapper", wrapper],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_float8_under_fsdp2_has_the_numbers_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="the oracle is torchao 0.18")
    for rank in run_ranks("tests.distributed.float8_cases", tmp_path, 2, "float8_fsdp2"):
        found = rank["float8_fsdp2"]
        for gathers in ("float32", "bfloat16"):
            same_losses, same_weights, num_products = found[gathers]
            assert same_losses, gathers
            assert same_weights, gathers
            assert num_products > 0
        assert found["plain"], "float8 has other numbers than bfloat16"
