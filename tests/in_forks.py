"""Runs programs of a module in forks of one process, because it can name one PrivateUse1 backend.

    python -m tests.in_forks MODULE

The module has ``PROGRAMS``, functions without arguments by name, and ``prepare``, which runs once
before the forks.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def failures_of(module: str) -> dict[str, str]:
    """Returns the traceback of each program of a module; empty for one that ran to its end.

    A program that ended its process has none.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.in_forks", module]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('["')]
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(map(json.loads, lines))


def main(name: str) -> None:
    """Runs all programs of a module, and prints a line of JSON for each."""
    module: Any = importlib.import_module(name)
    module.prepare()
    for program, function in module.PROGRAMS.items():
        if (child := os.fork()) == 0:
            failure = _failure(function)
            sys.stdout.write(f"\n{json.dumps([program, failure])}\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


def _failure(function: Callable[[], None]) -> str:
    try:
        function()
    except BaseException:  # noqa: BLE001, it is reported
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main(sys.argv[1])
