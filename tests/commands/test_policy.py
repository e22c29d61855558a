"""``python -m amp_fx policy``: what a user reads, and the exit codes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx import preset
from amp_fx.commands.cli import main
from amp_fx.commands.parsers import POLICY_EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable

COMMANDS = [
    shlex.split(line.split("  ")[1].removeprefix("python -m amp_fx "))
    for line in POLICY_EXAMPLES.splitlines()[1:]
]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns a function that runs the command and returns what it prints."""

    def run(*args: str) -> str:
        assert main(["policy", *args]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def ops(run: Callable[..., str]) -> Callable[..., dict[str, dict[str, str]]]:
    """Returns a function that returns the policy of each op on each device."""
    return lambda *args: json.loads(run(*args, "--json"))["ops"]


def test_one_op_on_every_device(run: Any, ops: Any) -> None:
    other = dict.fromkeys(("cuda", "xpu", "mtia", "maia"), "fp32_set_opt_dtype")
    expected = {"cpu": "no policy", "mps": "fp32", **other}
    assert ops("softmax.int") == {"aten::softmax.int": expected}
    words = run("softmax.int").split()
    assert {"aten::softmax.int", *expected, "policy"} <= {word.strip(",") for word in words}
    data = json.loads(run("softmax.int", "--json"))
    assert (data["policy"], data["torch"]) == ("torch", torch.__version__)


CHOLESKY = pytest.mark.skipif(
    not hasattr(torch.ops.aten, "cholesky"), reason="removed in torch 2.15"
)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("aten::layer_norm", "--device", "cuda"), {"aten::layer_norm": "fp32"}),
        (("torch.nn.functional.layer_norm", "--device", "cuda"), {"aten::layer_norm": "fp32"}),
        (
            ("linalg_matrix_norm", "--device", "xpu"),
            {
                "aten::linalg_matrix_norm": "fp32_set_opt_dtype",
                "aten::linalg_matrix_norm.str_ord": "fp32_set_opt_dtype",
            },
        ),
        (("cholesky", "--device", "cpu", "--preset", "torch-2.13"), {"aten::cholesky": "fp32"}),
        pytest.param(
            ("cholesky", "--device", "cpu", "--preset", "torch-2.14"),
            {"aten::cholesky": "no policy"},
            marks=CHOLESKY,
        ),
        (("_cudnn_rnn", "--device", "cuda"), {"aten::_cudnn_rnn": "own kernel"}),
    ],
)
def test_one_device(ops: Any, args: tuple[str, ...], expected: dict[str, str]) -> None:
    """Covers other spellings, overloads, presets and ops that a kernel of their own casts."""
    assert ops(*args) == {op: {args[2]: policy} for op, policy in expected.items()}


def test_an_op_gets_the_reason_of_each_of_its_policies(run: Any) -> None:
    out = " ".join(run("grid_sampler").split())
    assert "fp32: The CPU kernels have no low-precision version" in out
    assert "promote: The inputs must have one dtype" in out
    assert "promote: " not in run("grid_sampler", "--device", "cpu")


def test_all_ops_of_all_devices(run: Any, ops: Any) -> None:
    out, found = run(), ops()
    for device, table in preset("torch").tables.items():
        for op, rule in table.items():
            assert found[op][device] == rule.value
            assert f"\n{op} " in out


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
