"""The report of ``make gpu``, from what pytest writes about stub tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.gpu.summary import report

if TYPE_CHECKING:
    from pathlib import Path

STUBS = """
import os, time
import pytest

def test_is_not_over():
    time.sleep(600)

@pytest.mark.parametrize("i", range(3))
def test_waits_for_that_worker(i):
    pass

def test_right():
    pass

def test_wrong():
    assert 1 == 2, "as it should be"

@pytest.mark.skip
def test_left_out():
    pass

def test_aborts():
    os.abort()
"""


@pytest.mark.slow
def test_results_of_ended_tests_survive_a_crash_and_an_interrupt(tmp_path: Path) -> None:
    (tmp_path / "test_stub.py").write_text(STUBS)
    path = tmp_path / "out.xml"
    options = ["-v", "-n2", "--dist=worksteal", "-c", "/dev/null", "-p", "no:cacheprovider"]
    options += ["--timeout=100", "--timeout-method=thread", f"--junitxml={path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, "test_stub.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert any("FAILED test_stub.py::test_aborts" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    lines = list(report(path))
    [row] = lines[lines.index("|---|---:|---:|---:|---:|") + 1 : lines.index("## Failures") - 1]
    assert row.startswith("| test_stub | 1 | 2 | 1 |")
    failures = [line for line in lines if line.startswith("- `test_stub::")]
    names = {line.removeprefix("- `test_stub::").partition("`")[0] for line in failures}
    assert names == {"test_wrong", "test_aborts"}
    assert any("as it should be" in line for line in failures)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    assert list(report(tmp_path / "out.xml"))[-1] == "pytest wrote no out.xml."
