"""``python -m amp_fx policy``: what a user reads, and the exit codes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
import torch

from amp_fx import preset
from amp_fx.commands.cli import main
from amp_fx.commands.parsers import POLICY_EXAMPLES
from amp_fx.tables import DEVICES

COMMANDS = [
    shlex.split(line.split("  ")[1].removeprefix("python -m amp_fx "))
    for line in POLICY_EXAMPLES.splitlines()[1:]
]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


class Run:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str) -> str:
        assert main(["policy", *args]) == 0
        return self._capsys.readouterr().out

    def rows(self, *args: str) -> dict[tuple[str, str], str]:
        """Device types by op and policy."""
        rows = {}
        op = ""
        for line in self(*args).splitlines()[2:]:
            cells = [cell.strip() for cell in line.strip().split("  ") if cell.strip()]
            if not cells:
                break
            op = cells.pop(0) if cells[0].startswith("aten::") else op
            if len(cells) == 2:
                rows[op, cells[0]] = cells[1]
        return rows


def test_one_op_on_every_device(run: Run) -> None:
    assert run.rows("softmax.int") == {
        ("aten::softmax.int", "no policy"): "cpu",
        ("aten::softmax.int", "fp32_set_opt_dtype"): "cuda, xpu, mtia, maia",
        ("aten::softmax.int", "fp32"): "mps",
    }


@pytest.mark.parametrize("name", ["aten::layer_norm", "torch.nn.functional.layer_norm"])
def test_other_spellings_and_one_device(run: Run, name: str) -> None:
    assert run.rows(name, "--device", "cuda") == {("aten::layer_norm", "fp32"): "cuda"}


def test_every_overload_has_its_row(run: Run) -> None:
    ops = [op for op, _ in run.rows("linalg_matrix_norm", "--device", "xpu")]
    assert ops == ["aten::linalg_matrix_norm", "aten::linalg_matrix_norm.str_ord"]


def test_a_preset_changes_the_answer(run: Run) -> None:
    of_preset = ("cholesky", "--device", "cpu", "--preset")
    assert run.rows(*of_preset, "torch-2.13") == {("aten::cholesky", "fp32"): "cpu"}
    if hasattr(torch.ops.aten, "cholesky"):  # removed in torch 2.15
        assert run.rows(*of_preset, "torch-2.14") == {("aten::cholesky", "no policy"): "cpu"}


def test_an_op_gets_the_reason_of_each_of_its_policies(run: Run) -> None:
    out = " ".join(run("grid_sampler").split())
    assert "fp32: The CPU kernels have no low-precision version" in out
    assert "promote: The inputs must have one dtype" in out
    assert "promote: " not in run("grid_sampler", "--device", "cpu")


def test_cudnns_rnn_is_not_called_uncast(run: Run) -> None:
    assert run.rows("_cudnn_rnn", "--device", "cuda") == {
        ("aten::_cudnn_rnn", "own kernel"): "cuda"
    }


def test_all_ops_of_all_devices(run: Run) -> None:
    out, data = run(), json.loads(run("--json"))["ops"]
    for device, table in preset("torch").tables.items():
        for op, rule in table.items():
            assert data[op][device] == rule.value
            assert f"\n{op} " in out


def test_json_has_the_rows(run: Run) -> None:
    data = json.loads(run("softmax.int", "--json"))
    assert (data["policy"], data["torch"]) == ("torch", torch.__version__)
    [(op, by_device)] = data["ops"].items()
    shown = run.rows(op)
    assert by_device == {
        device: word for (_, word), devices in shown.items() for device in devices.split(", ")
    }


def test_an_unknown_op_gets_near_names_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "sofmax"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no op 'sofmax'; similar names: aten::softmax" in captured.err


def test_an_unknown_preset_gets_near_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "--preset", "ipx"]) == 2
    assert "did you mean 'ipex'" in capsys.readouterr().err


def test_an_unknown_device_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(["policy", "--device", "cdua"])
    assert exit_code.value.code == 2
    assert all(device_type in capsys.readouterr().err for device_type in [*DEVICES][:1])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=shlex.join)
def test_every_example_of_the_help_text_runs(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0
    assert capsys.readouterr().out


def test_piped_output_is_plain_text() -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    code = "import sys; from amp_fx.commands.cli import main; code = main(['policy', 'exp']); "
    code += "sys.exit(3 if 'amp_fx.commands.explain' in sys.modules else code)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 0, "another command's imports were paid for"
    lines = done.stdout.decode().splitlines()
    assert any("aten::exp" in line for line in lines)
    assert b"\x1b" not in done.stdout
