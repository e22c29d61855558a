"""``python -m amp_fx build``, and what ``env`` says of the compiled part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from amp_fx import csrc
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.commands import env
from amp_fx.commands.cli import main
from amp_fx.csrc import build
from tests.csrc.parts import write_part

if TYPE_CHECKING:
    from pathlib import Path

needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Returns a small module in place of the compiled part, and where it is kept."""
    monkeypatch.setattr(csrc, "SOURCE", write_part(tmp_path, "amp_fx_watch"))
    monkeypatch.setattr(csrc._state, "started", {})
    monkeypatch.delenv(csrc.SWITCH, raising=False)
    chosen = tmp_path / "kept"
    monkeypatch.setenv(build.FOLDER_VARIABLE, str(chosen))
    build._private_folder.cache_clear()
    return chosen


@needs_compiler
def test_it_is_built(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("amp_fx_watch.cpp: built in ")
    assert line.endswith(build.SUFFIX)
    assert len([*folder.rglob(f"*{build.SUFFIX}")]) == 1
    assert main(["build"]) == 0
    assert "exists" in capsys.readouterr().out


@needs_compiler
def test_what_the_compiler_says_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    csrc.SOURCE.write_text("#error not for this torch\n")
    assert main(["build"]) == 1
    assert "not for this torch" in capsys.readouterr().err


@needs_compiler
def test_a_folder_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.write_text("a file")
    assert main(["build"]) == 1
    assert f"{folder} is not writable" in capsys.readouterr().err


def test_switched_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(csrc.SWITCH, "0")
    assert main(["build"]) == 1
    assert f"{csrc.SWITCH}=0" in capsys.readouterr().err


@needs_compiler
def test_env_says_where_it_is() -> None:
    assert "python -m amp_fx build" in dict(env.extension())["amp_fx_watch.cpp"]
    csrc.imported("amp_fx_watch", csrc.SOURCE)
    row = dict(env.extension())["amp_fx_watch.cpp"]
    assert row == str(build.find("amp_fx_watch", csrc.SOURCE))


def test_env_says_what_follows_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "has_cpp_compiler", lambda: False)
    row = dict(env.extension())["amp_fx_watch.cpp"]
    assert "cannot be built" in row
    assert "cast per call" in row
    monkeypatch.setenv(csrc.SWITCH, "0")
    assert f"{csrc.SWITCH}=0" in dict(env.extension())["amp_fx_watch.cpp"]
