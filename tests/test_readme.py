"""What README.md shows, run as it is shown."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from amp_fx.weights.write_signals import CAUGHT_BY, DEVICES

README = Path(__file__).resolve().parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"(?ms)^```python\n(.*?)^```", TEXT)
SHOWN = re.findall(r"(?ms)^```text\n(.*?)^```", TEXT)
"""What the examples print."""
SHELL = "".join(re.findall(r"(?ms)^```sh\n(.*?)^```", TEXT))
COMMANDS = SHELL.replace("\\\n", "").splitlines()

HAS_DOT = shutil.which("dot") is not None


def run(folder: Path, *arguments: str) -> str:
    """What Python prints, in a terminal of 100 columns."""
    paths = [str(README.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_examples() -> None:
    assert EXAMPLES
    assert SHOWN
    assert COMMANDS


def test_examples_run_in_order_and_print_what_is_shown(tmp_path: Path) -> None:
    """In a process of their own, which has not imported amp_fx."""
    examples = [text for text in EXAMPLES if HAS_DOT or "amp_fx.draw(" not in text]
    printed = run(tmp_path, "-c", "".join(examples))
    for text in SHOWN:
        assert text in printed


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(c.split()[3:5]) for c in COMMANDS])
def test_commands_run(command: str, tmp_path: Path) -> None:
    python, *arguments = shlex.split(command)
    assert python == "python"
    if "--html" in arguments and not HAS_DOT:
        pytest.skip("needs the dot program")
    assert run(tmp_path, *arguments)
    for path in (word for word in arguments if word.endswith(".html")):
        assert (tmp_path / path).exists()


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", TEXT))
def test_links_lead_somewhere(link: str) -> None:
    assert (README.parent / link).exists()


def test_the_table_of_signals_is_that_of_the_code() -> None:
    table = TEXT.split("| a write by |", 1)[1]
    lines = [line.strip("| ").split(" | ") for line in table.split("\n\n", 1)[0].splitlines()]
    shown = {kind: dict(zip(DEVICES, cells, strict=True)) for kind, *cells in lines[2:]}
    assert shown == {
        kind: {device: ", ".join(signals) for device, signals in caught.items()}
        for kind, caught in CAUGHT_BY.items()
    }
