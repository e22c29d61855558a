"""``--help`` imports no torch, and its choices are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from amp_fx.commands import cli, parsers
from amp_fx.commands.parsers import ADD
from amp_fx.csrc.build import FOLDER_VARIABLE
from amp_fx.drawing import draw
from amp_fx.exporting.entry import WEIGHTS
from amp_fx.options import OUTPUT_DTYPES
from amp_fx.policies.policy import preset_names

PROGRAM = """
import contextlib, sys
before = set(sys.modules)
from amp_fx.commands.cli import main
for arguments in ([], *[[name] for name in sys.argv[1:]]):
    with contextlib.suppress(SystemExit):
        main([*arguments, "--help"])
new = set(sys.modules) - before
assert not new & {"torch", "rich", "networkx", "numpy"}, sorted(new)
assert len(new) < 100, len(new)
"""


def test_help_imports_neither_torch_nor_many_modules() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *ADD], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == 1 + len(ADD)


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    return capsys.readouterr().out


def test_what_it_offers_is_what_the_code_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsers.OUTPUT_DTYPES == OUTPUT_DTYPES
    assert parsers.WEIGHTS == WEIGHTS
    assert ", ".join(f".{ending}" for ending in draw.FORMATS) == parsers.PICTURES
    assert {*parsers.PRESETS} == {n for n in preset_names() if not re.fullmatch(r"torch-.*", n)}
    assert FOLDER_VARIABLE in help_of("build", capsys)
