"""``python -m tests.traffic time``: its processes, and what it reports of them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.contenders import Settings
from tests.traffic import timed
from tests.traffic.models import TINY
from tests.traffic.worker import AMP_FX, FROZEN, LEAN, LIMIT, NATIVE

if TYPE_CHECKING:
    from pathlib import Path


SETTINGS = Settings(torch.device("cpu"))
CONTENDERS = {contender.name: contender for contender in (*timed.ONE, *timed.INFERENCE)}


@pytest.mark.parametrize("contender", [NATIVE, AMP_FX, FROZEN, LEAN, LIMIT])
def test_contenders_compute_in_the_low_dtype(contender: str) -> None:
    """In a region that is off, amp_fx casts nothing."""
    with torch.no_grad():
        call: Any = timed.prepare(TINY["mlp"], CONTENDERS[contender], SETTINGS, 0)
        assert call().dtype is SETTINGS.dtype


@pytest.mark.slow
def test_each_case_is_timed_in_a_process_and_failures_are_told(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    arguments = ["time", "decode", "--tiny", "--device", "cpu", "--repeats", "1", "--json", path]
    command = [sys.executable, "-m", "tests.traffic", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    timings: list[dict[str, Any]] = json.loads(path.read_text())["timings"]
    kinds = {row["kind"]: set(row["seconds"]) for row in timings}
    assert kinds == {
        "inference": {NATIVE, AMP_FX, FROZEN, LIMIT},
        "training, 1": {NATIVE, AMP_FX, LEAN, LIMIT, "uncached"},
        "training, 4": {NATIVE, AMP_FX, LEAN},
    }
    late = subprocess.run(
        [*command, "--compile-seconds", "0"], capture_output=True, text=True, check=False
    )
    assert late.returncode == 1
    assert "decode, all failed: did not compile in time" in late.stdout


def test_an_unknown_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        timed.main(["nope", "--device", "cpu"])
    assert "no case nope" in capsys.readouterr().err
