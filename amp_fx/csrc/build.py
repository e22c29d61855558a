"""Builds the compiled parts, and keeps them on disk for other processes.

A library depends on its source, on torch and on Python, and not on where those lie. Another
virtual environment and another layer of a container image find it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import filelock  # torch needs it too
import torch

from amp_fx.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "AMP_FX_CACHE_DIR"
"""Environment variable; the folder of the libraries."""

SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")
OPTIMIZE = "O1"  # O3 doubles the time, and a call of a graph takes as long
GCC_FLAGS = ("-param ggc-min-expand=1000", "-param ggc-min-heapsize=4000000")
"""g++ collects no garbage: a tenth of the time, for 700 MB of memory instead of 500."""

PARALLEL = b"<ATen/Parallel.h>"
"""A source that includes this is compiled with OpenMP, which its loops need."""

PATIENCE = 120.0
"""Seconds to wait for another process that builds the same; then this one builds too."""


def cache_folder() -> Path:
    """Returns the folder of all libraries; it may not exist yet."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    from amp_fx.torch_private.inductor_build import cache_dir

    return Path(cache_dir()) / "amp_fx"


def key(source: Path) -> str:
    """Returns a digest of what a library depends on.

    The compiler is not in it: an image without one uses what was built elsewhere. If the library
    cannot be imported, for example because it wants a newer C library, it is built again.
    """
    abi = (
        torch.__version__,
        torch.version.git_version,
        torch.compiled_with_cxx11_abi(),
        sysconfig.get_config_var("SOABI") or sys.version,
        sys.platform,
        platform.machine(),
        OPTIMIZE,
    )
    return hashlib.sha256(source.read_bytes() + repr(abi).encode()).hexdigest()[:16]


def find(name: str, source: Path) -> Path | None:
    """Returns the library of a source if it was built before and is whole.

    A file's name ends with the digest of its content. A truncated file is not loaded: that could
    end the process.
    """
    folders = [cache_folder() / key(source)]
    if _private_folder.cache_info().currsize:
        folders.append(_private_folder() / key(source))
    found = (path for folder in folders for path in _libraries(folder, name) if _is_whole(path))
    return next(found, None)


def start(name: str, source: Path, rejected: Path | None = None) -> Future[Path]:
    """Starts to build a library in a thread, and returns its path to come.

    The thread waits for the compiler, a process of its own, and for other processes that build
    the same. It imports nothing: two threads that import inductor at once could get in each
    other's way.

    Raises:
        UnsupportedError: No compiler is found.
    """
    job = _job(name, source, rejected)
    future: Future[Path] = Future()

    def run() -> None:
        try:
            future.set_result(job.run())
        except Exception as error:  # whatever it is, who waits is to have it
            log.debug("not built", exc_info=True)
            future.set_exception(error)

    # A daemon: a program that ends meanwhile does not wait.
    threading.Thread(target=run, name=f"build {name}", daemon=True).start()
    return future


@dataclasses.dataclass(frozen=True)
class _Job:
    """Holds what a thread needs to build one library."""

    name: str
    folder: Path
    scratch: tempfile.TemporaryDirectory[str]
    command: tuple[str, ...]
    output: Path
    rejected: Path | None

    def run(self) -> Path:
        """Builds the library unless another process has done so meanwhile; returns its path."""
        with self.scratch, _locked(self.folder / f"{self.name}.lock"):
            return self._built_by_others() or self._build()

    def _built_by_others(self) -> Path | None:
        usable = (path for path in self._libraries() if path != self.rejected)
        return next(filter(_is_whole, usable), None)

    def _libraries(self) -> list[Path]:
        return _libraries(self.folder, self.name)

    def _build(self) -> Path:
        done = subprocess.run(
            self.command,
            cwd=self.scratch.name,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise UnsupportedError(f"{shlex.join(self.command)}\n{done.stdout}")
        for path in self._libraries():
            if path == self.rejected or not _is_whole(path):
                path.unlink(missing_ok=True)
        # The name is that of this content: two processes never write to one file.
        path = self.folder / f"{self.name}-{_digest(self.output)}{SUFFIX}"
        return self.output.replace(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other processes from building the same, where the file system has locks."""
    lock = filelock.FileLock(path, timeout=PATIENCE)
    try:
        lock.acquire()
    except (filelock.Timeout, OSError, NotImplementedError) as error:
        log.debug("building without a lock: %s", error)
    try:
        yield
    finally:
        lock.release()  # does nothing if it was not acquired


def _job(name: str, source: Path, rejected: Path | None) -> _Job:
    """Prepares a build, and says in one line what is about to be built.

    Raises:
        UnsupportedError: No compiler is found.
    """
    scratch = _scratch(source)
    folder = Path(scratch.name).parent
    try:
        command, output = _command(name, source, scratch.name)
    except Exception as error:
        scratch.cleanup()
        raise UnsupportedError(str(error)) from error
    log.warning(
        "building %s of amp_fx in %s: about 10 seconds, once for this Python and torch"
        " (ahead of time: python -m amp_fx build)",
        source.name,
        folder,
    )
    return _Job(name, folder, scratch, command, output, rejected)


def _scratch(source: Path) -> tempfile.TemporaryDirectory[str]:
    """Makes a folder to build in, beside where the library is to be."""
    folder = cache_folder() / key(source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder, prefix="build-")
    except OSError as error:
        log.info("building for this process alone: %s", error)
    folder = _private_folder() / key(source)
    folder.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir=folder, prefix="build-")


@functools.cache
def _private_folder() -> Path:
    """Makes a folder for this process, where the usual one cannot be written."""
    return Path(_private().name)


@functools.cache
def _private() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="amp_fx-")


def _command(name: str, source: Path, folder: str) -> tuple[tuple[str, ...], Path]:
    """Returns the call of the compiler, and the file that it writes.

    Relies on inductor's ``CppBuilder`` and ``CppTorchOptions`` to know the compiler, and
    torch's headers and libraries.
    """
    from amp_fx.torch_private.inductor_build import CppBuilder, CppTorchOptions, is_gcc

    options = CppTorchOptions(warning_all=False, include_pytorch=True)
    is_parallel = PARALLEL in source.read_bytes()
    plain = _plain_flags(options._cflags, has_openmp=is_parallel)
    options._cflags = [*plain, *(GCC_FLAGS if is_gcc() else ())]
    options._libraries = [each for each in options._libraries if is_parallel or "omp" not in each]
    options._libraries.append("torch_python")
    builder = CppBuilder(name, str(source), options, folder)
    return tuple(shlex.split(builder.get_command_line())), Path(builder.get_target_file_path())


def _plain_flags(flags: Iterable[str], *, has_openmp: bool) -> list[str]:
    """Leaves out the flags that make kernels fast.

    They cost time here. With one of them, ``-march=native``, a library of an image would be for
    the processor of the machine that built it; with OpenMP it would want libgomp.
    """
    openmp = () if has_openmp else ("fopenmp", "openmp")
    unwanted = ("march=", "mcpu=", "mtune=", "g1", "gline-tables-only", *openmp)
    kept = [flag for flag in flags if not flag.startswith(unwanted)]
    return [OPTIMIZE if flag in ("O2", "O3") else flag for flag in kept]


def _libraries(folder: Path, name: str) -> list[Path]:
    """Lists the files that were built for a module, whole or not."""
    return sorted(folder.glob(f"{name}-*{SUFFIX}"))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _is_whole(path: Path) -> bool:
    try:
        return path.name.removesuffix(SUFFIX).endswith(f"-{_digest(path)}")
    except OSError:  # deleted, or not ours to read
        return False
