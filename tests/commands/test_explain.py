"""``python -m amp_fx explain`` and ``env``: what a user reads, and the exit codes."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from amp_fx.commands.cli import main
from amp_fx.commands.explain import load, make_optimizer, parse_input
from amp_fx.errors import OptionError, UnsupportedError
from amp_fx.explanation.explanation import SCHEMA
from tests import needs

if TYPE_CHECKING:
    from pathlib import Path

TARGETS = "tests.models.explained"


def test_a_factory_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{TARGETS}:mlp", "--input-shape", "8,16"]) == 0
    assert "6 in every call" in capsys.readouterr().out


@needs.HOOK
def test_a_gpu_keeps_casts_without_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", f"{TARGETS}:mlp", "--input-shape", "8,16", "--device", "cuda"]
    with torch.no_grad():
        assert main(arguments) == 0
    assert "4 cached" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "4 cached" not in capsys.readouterr().out


@pytest.mark.slow
def test_json_of_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--input-shape", "2,16:int64", "--meta", "--device", "cuda", "--json"]
    assert main(["explain", f"{TARGETS}:gpt", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device_type"], found["dtype"], found["schema"]) == ("cuda", "bfloat16", SCHEMA)


def test_views_are_shown_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", f"{TARGETS}:gpt", "--input-shape", "2,16:int64"]
    assert main(arguments) == 0
    assert "views not shown" in capsys.readouterr().out
    assert main([*arguments, "--all"]) == 0
    assert "not shown" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("AdamV", "Adam"),
        ("AdamW:quick", "foreach"),
        ("Adadelta:fused", "fused"),
        ("SparseAdam:foreach", "foreach"),
    ],
)
def test_an_optimizer_that_is_none(optimizer: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make_optimizer(optimizer, torch.nn.Linear(4, 4))


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs the dot program")
def test_a_page_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture = tmp_path / "a.html", tmp_path / "a.svg"
    shape = ["--input-shape", "2,10,64"]
    files = ["--html", str(page), "--draw", str(picture)]
    assert main(["explain", f"{TARGETS}:Attention", *shape, *files]) == 0
    assert str(page) in capsys.readouterr().err
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "<svg" in picture.read_text()


def test_what_a_target_may_be() -> None:
    assert load("torch:relu") == (torch.relu, None)
    model, inputs = load("tests.commands.test_explain:with_inputs")
    assert isinstance(model, torch.nn.Linear)
    assert [tuple(x.shape) for x in inputs] == [(2, 4)]


def with_inputs() -> tuple[torch.nn.Module, torch.Tensor]:
    return torch.nn.Linear(4, 4), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torch.nn", "not of the form package.module:name"),
        ("nowhere.at_all:x", "cannot be imported"),
        ("torch.nn.functional:softmx", "did you mean 'softmax'"),
        ("torch.nn:Linear", r"without arguments \(in_features, out_features\)"),
        ("torch:float32", "is a dtype"),
    ],
)
def test_targets_that_are_none(target: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load(target)


def test_inputs() -> None:
    x = parse_input("8,64:int64")
    assert (x.dtype, tuple(x.shape)) == (torch.int64, (8, 64))
    assert parse_input("(3, 4)", is_meta=True).device.type == "meta"
    with pytest.raises(OptionError, match="write sizes such as"):
        parse_input("8,b")
    with pytest.raises(OptionError, match="'int63' is not a dtype"):
        parse_input("8:int63")


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"].startswith(torch.__version__.split("+")[0])
    assert "autocast to bfloat16" in lines["cpu"]
