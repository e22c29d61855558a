"""Mistakes on the command line are one line on the standard error stream, and exit code 2."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from torch import nn

from amp_fx.commands.cli import main

if TYPE_CHECKING:
    from pathlib import Path

HERE = "tests.commands.test_errors"
MLP = ("explain", "tests.models.explained:mlp")
ACCURACY = ("accuracy", "torch:relu", "--input-shape", "8,64")
EXPORT = ("export", f"{HERE}:embedding", "--input-shape", "4,8:int64")

TORCHS = re.compile(r"[EW]\d{4} [\d:.]+ \d+ torch/")
"""How a line begins that torch logs, as 2.15 does of shapes that do not fit."""


def embedding() -> nn.Module:
    return nn.Embedding(10, 4)


def broken() -> nn.Module:
    return nn.Linear(2, 3, device="nowhere")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (MLP, "pass their shapes, such as --input-shape"),
        ((*MLP, "--input-shape", "8,17"), "cannot be traced"),
        ((*MLP, "--input-shape", "8,16", "--device", "gpu"), "cannot autocast; use one of"),
        ((*MLP, "--input-shape", "8,16", "--draw", "a.jpg"), ".svg, .pdf, .png"),
        ((*MLP, "--input-shape", "8,16", "--html", "a.svg"), "end in .html"),
        (("explain", f"{HERE}:embedding", "--input-shape", "2,8"), "--input-shape 2,8:int64"),
        *(
            (("explain", path, "--input-shape", "2"), "cannot be imported")
            for path in ("../x:y", "..x:y", "./a/b.py:y", "a\nb:y")
        ),
        ((*ACCURACY, "--save", "a.toml"), "pass --search as well"),
        ((*ACCURACY, "--policy", "float8-rowwise"), "pass --search as well"),
        ((*ACCURACY, "--search", "0.1", "--save", "a.txt"), "end in .toml"),
        ((*ACCURACY, "--search", "-1"), "not a number of at least 0"),
        ((*EXPORT, "model.txt"), "end in .pt2 or .onnx"),
        ((*EXPORT, "--package", "model.onnx"), "end in .pt2"),
        ((*EXPORT, "--target", "tensorrt", "m.pt2"), "end in .onnx"),
        ((*EXPORT, "nowhere/model.pt2"), "in an existing folder"),
        ((*EXPORT, "--dtype", "int8", "model.pt2"), "not a dtype"),
        ((*EXPORT[:2], "model.pt2"), "needs inputs: pass their shapes"),
        (("export", "torch:relu", "--input-shape", "4,8", "model.pt2"), "not a module"),
        (("audit", "torch:relu", "--input-shape", "8,64"), "neither calls backward() nor returns"),
        (("policy", "sofmax"), "no op 'sofmax'; similar names: aten::softmax"),
        (("policy", "--preset", "ipx"), "did you mean 'ipex'"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    own = [line for line in error.strip().splitlines() if not TORCHS.match(line)]
    assert len(own) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", [("explain",), ("export", "model.pt2"), ("accuracy",)], ids=lambda c: c[0]
)
@pytest.mark.parametrize("option", [(), ("--traceback",)])
def test_a_factory_that_raises_is_an_error_line(
    command: tuple[str, ...], option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{HERE}:broken"
    name, *more = command
    assert main([name, target, *more, "--input-shape", "1,2", *option]) == 2
    *trace, line = capsys.readouterr().err.splitlines()
    assert target in line
    assert "raised RuntimeError: " in line
    assert "nowhere" in line
    assert any("in broken" in each for each in trace) == bool(option)
    assert bool(trace) == bool(option)


def test_an_unknown_device_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(["policy", "--device", "cdua"])
    assert exit_code.value.code == 2
    assert "cpu" in capsys.readouterr().err
