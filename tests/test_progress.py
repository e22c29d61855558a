"""The line of progress: on a terminal, for every call that may take long, and nowhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import amp_fx
from amp_fx import progress

ROOT = Path(__file__).parents[1]

BEGIN = """
import os
import torch, amp_fx, amp_fx.progress
amp_fx.progress.DELAY = 0
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).eval()
x = torch.ones(2, 8)
"""
EXPLAIN = "amp_fx.explain(net)(x)"
SWITCHED_OFF = """
for name, value in {"AMP_FX_PROGRESS": "0", "LOCAL_RANK": "1", "TORCH_LOGS": "+fsdp"}.items():
    os.environ[name] = value
    amp_fx.explain(net)(x)
    del os.environ[name]
"""

TOOLS = """
torch.compile(net, backend="amp_fx", options={"compiler": "aot_eager"})(x)
amp_fx.accuracy(net)(x)
amp_fx.search(net, tolerance=1.0)(x)
amp_fx.verify(net, options={"compiler": "eager"})(x)
amp_fx.export(net, (x,))
amp_fx.store_low(net)(x)
"""

LINES = """compiling a graph of
explaining Sequential
examining Sequential in bfloat16
searching Sequential
verifying Sequential
exporting a module
storing the weights of Sequential"""


def environment() -> dict[str, str]:
    mine = ("PYTEST_CURRENT_TEST", "TORCH_LOGS", "LOCAL_RANK")
    env = {name: value for name, value in os.environ.items() if name not in mine}
    return {**env, "TERM": "xterm", "PYTHONPATH": str(ROOT)}


def on_terminal(script: str) -> str:
    """Returns the stderr that a process writes to a terminal while it runs a script."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environment(), stderr=theirs) as process:
        os.close(theirs)
        found = b""
        with open(ours, "rb", buffering=0) as terminal:  # noqa: PTH123 - no path
            try:
                while part := terminal.read(4096):
                    found += part
            except OSError:  # the other end is closed
                pass
    assert process.returncode == 0, found.decode()
    return found.decode()


@pytest.mark.slow
def test_a_terminal_gets_a_line_for_every_call_and_loses_it_again() -> None:
    found = on_terminal(BEGIN + EXPLAIN + TOOLS)
    for line in LINES.splitlines():
        assert re.search(rf"amp_fx \(\d+ s\): {line}", found), line
    screen = re.split(r"\x1b\[2K", found)[-1]  # what follows when the last line was erased
    assert "amp_fx" not in screen
    assert found.rindex("\x1b[?25h") > found.rindex("\x1b[?25l"), "the cursor is hidden"


@pytest.mark.slow
def test_can_be_turned_off() -> None:
    assert "amp_fx (" not in on_terminal(BEGIN + SWITCHED_OFF)


def test_a_pipe_gets_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setenv("FORCE_COLOR", "1")
    amp_fx.explain(torch.nn.Linear(2, 2))(torch.ones(1, 2))
    found = capfd.readouterr().err
    assert "amp_fx (" not in found
    assert "\x1b" not in found
