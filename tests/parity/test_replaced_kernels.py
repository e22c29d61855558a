"""A policy of modules replaces eager autocast's kernels, in all code of the process."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_eager_autocast_stays_as_it_was() -> None:
    command = [sys.executable, "-m", "tests.parity.replaced_kernels_program"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("differs")] == []
    assert int(lines[-1].split()[1]) > 3000
