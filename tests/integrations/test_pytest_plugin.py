"""The pytest plugin: it fails with the findings of an audit, and loads only where asked."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

AUDITS = """
import pytest
import torch
from torch import nn

@pytest.mark.parametrize("allow", [[], ["weights_low"], ["weight_low"]], ids=str)
def test_net(amp_precision, allow):
    step = nn.Linear(16, 4, dtype=torch.bfloat16)
    def loss(x):
        with torch.autocast("cpu", torch.bfloat16):
            return step(x).float().square().mean()
    amp_precision.audit(loss, torch.randn(8, 16), allow=allow)
"""


def run(folder: Path, test: str, *flags: str) -> str:
    """Runs a test in another process; returns what it prints, and the exit code."""
    (folder / "test_it.py").write_text(test)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "COLUMNS": "140"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return f"{done.stdout}{done.stderr}\nexit {done.returncode}"


def test_an_audit_fails_with_findings_that_are_not_allowed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["amp_fx.pytest"]\n')
    printed = run(tmp_path, AUDITS, "-p", "no:xdist")
    assert "exit 1" in printed
    assert "2 failed, 1 passed" in printed
    assert "weights_low: test_it.py:10" in printed
    assert "the kinds are update_lost, state_low" in printed


LOADED = """
import sys

def test_it():
    assert ("amp_fx" in sys.modules, "torch" in sys.modules) == ({is_loaded}, False)
"""


@pytest.mark.parametrize("is_loaded", [False, True])
def test_it_loads_where_a_project_asks_for_it_and_imports_no_torch(
    tmp_path: Path, is_loaded: bool
) -> None:
    if is_loaded:
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["amp_fx.pytest"]\n')
    # other plugins that are installed import torch
    flags = [f"-pno:{e.name}" for e in importlib.metadata.entry_points(group="pytest11")]
    assert "exit 0" in run(tmp_path, LOADED.replace("{is_loaded}", str(is_loaded)), *flags)
