"""``python -m amp_fx accuracy``: what a user reads, and the exit codes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from amp_fx import Policy
from amp_fx.commands.cli import main
from tests.numerics.faults import Bare, Scores

if TYPE_CHECKING:
    from pathlib import Path

    import torch

HERE = "tests.commands.test_accuracy"


def broken() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Bare(Scores()), Bare.inputs()


def test_a_fault_is_exit_code_1_and_a_sound_step_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", f"{HERE}:broken", "--dtype", "float16"]) == 1
    assert "1. bad: matmul (forward, float16)" in capsys.readouterr().out
    assert main(["accuracy", "torch:relu", "--input-shape", "8,64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["suspects"] == []


@pytest.mark.slow
def test_a_repair_is_searched_for_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "amp.toml"
    arguments = ["--dtype", "float16", "--scale", "1024", "--search", "0.03"]
    assert main(["accuracy", f"{HERE}:broken", *arguments, "--save", str(path)]) == 0
    assert "none can be left out" in capsys.readouterr().out
    assert [(m.text, m.op) for m in Policy.load(path).modules] == [("bad", "matmul")]
