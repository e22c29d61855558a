"""The compiled parts are built, cached and found again."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import sysconfig
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_fx import csrc
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.csrc import build
from amp_fx.errors import UnsupportedError
from tests.csrc.parts import write_part

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="needs a C++ compiler")
NAME = "amp_fx_tiny"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sets a new folder for the compiled libraries."""
    chosen = tmp_path / "kept"
    monkeypatch.setenv(build.FOLDER_VARIABLE, str(chosen))
    build._private_folder.cache_clear()
    return chosen


@pytest.fixture
def source(folder: Path, tmp_path: Path) -> Path:  # noqa: ARG001
    """Returns the source of a small module."""
    return write_part(tmp_path, NAME)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the calls of the compiler."""
    calls: list[Any] = []
    compile_it = build._Job._build

    def spy(job: Any) -> Path:
        calls.append(job.command)
        return compile_it(job)

    monkeypatch.setattr(build._Job, "_build", spy)
    return calls


def put(folder: Path, content: bytes, digest: str | None = None) -> Path:
    """Puts a file where a library would be."""
    digest = digest or hashlib.sha256(content).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}-{digest}{build.SUFFIX}"
    path.write_bytes(content)
    return path


def test_built_once_and_found_again(source: Path, folder: Path, compiled: list[Any]) -> None:
    assert build.find(NAME, source) is None
    first = csrc.imported(NAME, source)
    assert first.answer == 42
    assert csrc.imported(NAME, source).__file__ == first.__file__
    assert str(build.find(NAME, source)) == first.__file__
    assert len(compiled) == 1
    left = {path.suffix for path in (folder / build.key(source)).iterdir()}
    assert left == {".so", ".lock"}  # and no folder to build in


def test_the_key_is_of_content_and_no_path(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = build.key(source)
    monkeypatch.setattr(sys, "executable", "/another/venv/bin/python")
    monkeypatch.setattr(sys, "prefix", "/another/venv")
    monkeypatch.setattr(torch, "__file__", "/another/venv/torch/__init__.py")
    (tmp_path / "layer").mkdir()
    assert build.key(write_part(tmp_path / "layer", NAME)) == key


@pytest.mark.parametrize("what", ["torch", "git", "abi", "python", "machine", "source"])
def test_another_abi_has_another_key(
    what: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = build.key(source)
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif what == "git":
        monkeypatch.setattr(torch.version, "git_version", "abc")
    elif what == "abi":
        old = torch.compiled_with_cxx11_abi()
        monkeypatch.setattr(torch, "compiled_with_cxx11_abi", lambda: not old)
    elif what == "python":
        monkeypatch.setattr(sysconfig, "get_config_var", lambda _: "cpython-399")
    elif what == "machine":
        monkeypatch.setattr("platform.machine", lambda: "riscv64")
    else:
        source.write_text(source.read_text() + "// changed\n")
    assert build.key(source) != key


def test_without_the_variable_it_is_beside_inductors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(build.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert build.cache_folder() == tmp_path / "amp_fx"


def test_a_truncated_library_is_built_again(source: Path) -> None:
    whole = build.start(NAME, source).result()
    content = whole.read_bytes()
    whole.write_bytes(content[: len(content) // 2])
    assert build.find(NAME, source) is None
    assert csrc.imported(NAME, source).answer == 42
    assert len(build._libraries(whole.parent, NAME)) == 1


def test_a_library_that_cannot_be_imported_is_built_again(
    source: Path, folder: Path, compiled: list[Any]
) -> None:
    foreign = put(folder / build.key(source), b"of another C library")
    assert build.find(NAME, source) == foreign
    assert csrc.imported(NAME, source).answer == 42
    assert len(compiled) == 1
    assert not foreign.exists()


def test_two_at_once_build_one(source: Path, compiled: list[Any]) -> None:
    paths = [each.result() for each in [build.start(NAME, source) for _ in range(3)]]
    assert len(set(paths)) == 1
    assert len(compiled) == 1
    assert build.find(NAME, source) == paths[0]


def test_who_waits_too_long_builds_too(
    source: Path, folder: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PATIENCE", 0.05)
    (folder / build.key(source)).mkdir(parents=True)
    with build._locked(folder / build.key(source) / f"{NAME}.lock"):  # of one that hangs
        assert build.start(NAME, source).result().exists()
    assert len(compiled) == 1


def test_a_folder_that_cannot_be_written(
    source: Path, folder: Path, compiled: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file: no folder can be made here")
    with caplog.at_level(logging.INFO, logger=build.__name__):
        assert csrc.imported(NAME, source).answer == 42
    assert "for this process alone" in caplog.text
    assert build.find(NAME, source) is not None  # by this process
    csrc.imported(NAME, source)
    assert len(compiled) == 1


def test_what_fails_says_what_the_compiler_said(source: Path, folder: Path) -> None:
    source.write_text("no C++ at all")
    with pytest.raises(UnsupportedError, match=r"(?s)amp_fx_tiny\.cpp.*error"):
        csrc.imported(NAME, source)
    assert build.find(NAME, source) is None
    assert [path.suffix for path in (folder / build.key(source)).iterdir()] == [".lock"]


def test_without_a_compiler(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("amp_fx.torch_private.inductor_build.CppTorchOptions", no_compiler)
    with pytest.raises(UnsupportedError, match="no compiler"):
        build.start(NAME, source)
    assert not [*(folder / build.key(source)).iterdir()]
    monkeypatch.setattr(csrc, "SOURCE", source)
    csrc.start()  # says nothing: load does
    assert csrc.load.__wrapped__() is None


def test_the_library_serves_other_processors(source: Path, tmp_path: Path) -> None:
    command, _ = build._command(NAME, source, str(tmp_path))
    unwanted = ("-march", "-mcpu", "-mtune", "-fopenmp", "-lgomp", "-g")
    assert not [flag for flag in command if flag.startswith(unwanted)]
    assert f"-{build.OPTIMIZE}" in command


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The compiler begins when this is set."""
    event = threading.Event()
    compile_it = build._Job._build

    def wait(job: Any) -> Path:
        assert event.wait(60)
        return compile_it(job)

    monkeypatch.setattr(build._Job, "_build", wait)
    return event


@pytest.fixture
def watched(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,  # noqa: ARG001
    tmp_path: Path,
) -> Path:
    """A small module in place of what looks at weights; none is being built."""
    source = write_part(tmp_path, "amp_fx_watch")
    monkeypatch.setattr(csrc, "SOURCE", source)
    monkeypatch.setattr(csrc._state, "started", {})
    monkeypatch.delenv(csrc.SWITCH, raising=False)
    return source


def test_start_does_not_wait_and_load_does(
    watched: Path, held: threading.Event, compiled: list[Any]
) -> None:
    csrc.start()
    csrc.start()
    assert build.find("amp_fx_watch", watched) is None
    threading.Timer(0.2, held.set).start()
    assert csrc.load.__wrapped__().answer == 42
    csrc.start()  # it is there
    assert len(compiled) == 1


@pytest.mark.usefixtures("watched")
def test_nothing_is_started_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(csrc.SWITCH, "0")
    csrc.start()
    assert not csrc._state.started


def test_the_backend_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[None] = []
    monkeypatch.setattr(csrc, "start", lambda: started.append(None))
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="amp_fx", options={"compiler": "eager"})
    compiled(torch.ones(2, 2))
    assert len(started) == 1


@pytest.mark.parametrize("is_training", [True, False])
def test_training_on_the_cpu_does_not_wait_for_it(
    is_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step on the CPU caches nothing by default, so that its first call needs no watch."""
    loads: list[None] = []
    monkeypatch.setattr(csrc, "load", lambda: loads.append(None))
    compiled = torch.compile(
        torch.nn.Linear(2, 2), backend="amp_fx", options={"compiler": "aot_eager"}
    )
    with torch.set_grad_enabled(is_training):
        loss = compiled(torch.ones(2, 2)).sum()
    if is_training:
        loss.backward()
    assert bool(loads) is not is_training


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.usefixtures("watched")
def test_a_fork_does_not_wait_for_threads_that_it_lacks(held: threading.Event) -> None:
    csrc.start()
    with csrc._state.lock:  # another thread loads
        if (child := os.fork()) == 0:
            is_free = csrc._state.lock.acquire(blocking=False)
            os._exit(0 if is_free and not csrc._state.started else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held.set()
    assert csrc.load.__wrapped__().answer == 42
