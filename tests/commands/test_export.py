"""``python -m amp_fx export``: files that torch and onnxruntime load, and the exit codes."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from amp_fx.commands import parsers
from amp_fx.commands.cli import main
from amp_fx.exporting.onnx_file import TARGETS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TARGET = "tests.commands.test_export:make"


def make() -> nn.Module:
    torch.manual_seed(1234)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 4))


def test_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pt2"
    options = ["--input-shape", "4,8", "--dtype", "float16", "--dynamic", "0"]
    assert main(["export", TARGET, *options, str(path)]) == 0
    assert f"wrote {path}: weights" in capsys.readouterr().out
    program = torch.export.load(path)
    assert program.state_dict["0.weight"].dtype == torch.float16
    x = torch.randn(7, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        expected = make().eval()(x).float()
    torch.testing.assert_close(program.module()(x), expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs onnxruntime")
@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="needs onnxscript")
def test_onnx(tmp_path: Path) -> None:
    onnxruntime = importlib.import_module("onnxruntime")
    path = tmp_path / "model.onnx"
    assert main(["export", TARGET, "--input-shape", "4,8", str(path)]) == 0
    x = torch.randn(4, 8)
    session = onnxruntime.InferenceSession(path)
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = make().eval()(x).float()
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0.02, atol=0.02)


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="needs onnxscript")
def test_onnx_for_tensorrt(tmp_path: Path) -> None:
    onnx = importlib.import_module("onnx")
    path = tmp_path / "model.onnx"
    options = ["--input-shape", "4,8", "--target", "tensorrt", "--dtype", "float16"]
    assert main(["export", TARGET, *options, str(path)]) == 0
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    metadata = {prop.key: prop.value for prop in model.metadata_props}
    assert metadata["amp_fx.region"] == "cuda float16, policy 'torch'"


def test_targets_are_those_of_to_onnx() -> None:
    assert set(parsers.TARGETS) == set(TARGETS)
