"""Builds C++ extensions and caches them on disk.

The cache key contains the source and the versions of torch and Python, but no paths. Other virtual
environments and other layers of a container image can therefore reuse a library.
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

import filelock  # also a dependency of torch
import torch

from amp_fx.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "AMP_FX_CACHE_DIR"
"""Environment variable with the folder of the libraries."""

SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")
OPTIMIZE = "O1"  # with O3, the build takes twice as long and calls are not faster
GCC_FLAGS = ("-param ggc-min-expand=1000", "-param ggc-min-heapsize=4000000")
"""Disables g++'s garbage collector: saves a tenth of the build time, for 700 MB of memory instead
of 500 MB."""

PATIENCE = 120.0
"""Seconds to wait for another process that builds the same library before building it as well."""


def cache_folder() -> Path:
    """Returns the folder of all libraries; it may not exist yet."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        return Path(folder).absolute()
    from amp_fx.torch_private.inductor_build import cache_dir

    return Path(cache_dir()) / "amp_fx"


def key(source: Path) -> str:
    """Returns the cache key of a library.

    The key does not contain the compiler, so that an image without a compiler can use a library
    from another image. A library that cannot be imported, for example because it requires a newer
    C library, is built again.
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
    """Returns the cached library of a source; None if there is none.

    The name of a library ends with the digest of its content. Truncated files are ignored, because
    loading them could crash the process.
    """
    folders = [cache_folder() / key(source)]
    if _private_folder.cache_info().currsize:
        folders.append(_private_folder() / key(source))
    paths = (path for folder in folders for path in _libraries(folder, name))
    return next(filter(_is_complete, paths), None)


def start(name: str, source: Path, rejected: Path | None = None) -> Future[Path]:
    """Starts building a library in a thread; returns a future of its path.

    The thread waits for the compiler, and for other processes that build the same library.

    Raises:
        UnsupportedError: No compiler was found.
    """
    # Prepared here, because importing inductor in two threads at once is not safe.
    job = _job(name, source, rejected)
    future: Future[Path] = Future()

    def run() -> None:
        try:
            future.set_result(job.run())
        except Exception as error:  # re-raised by future.result()
            log.debug("could not build %s", source.name, exc_info=True)
            future.set_exception(error)

    # A daemon thread does not delay the end of the program.
    threading.Thread(target=run, name=f"build {name}", daemon=True).start()
    return future


@dataclasses.dataclass(frozen=True)
class _Job:
    """Build of one library."""

    name: str
    folder: Path
    scratch: tempfile.TemporaryDirectory[str]
    command: tuple[str, ...]
    output: Path
    rejected: Path | None

    def run(self) -> Path:
        """Builds the library unless another process has built it; returns its path."""
        with self.scratch, _locked(self.folder / f"{self.name}.lock"):
            for path in _libraries(self.folder, self.name):
                if path != self.rejected and _is_complete(path):
                    return path
            return self._build()

    def _build(self) -> Path:
        process = subprocess.run(
            self.command,
            cwd=self.scratch.name,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if process.returncode != 0:
            raise UnsupportedError(
                f"the compiler failed: {shlex.join(self.command)}\n{process.stdout}"
            )
        for path in _libraries(self.folder, self.name):
            if path == self.rejected or not _is_complete(path):
                path.unlink(missing_ok=True)
        # The name contains a digest of the content, so two processes never write the same file.
        path = self.folder / f"{self.name}-{_digest(self.output)}{SUFFIX}"
        return self.output.replace(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context that excludes other processes, if the file system supports locks."""
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
    """Prepares a build and announces it in the log.

    Raises:
        UnsupportedError: No compiler was found.
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
    """Creates a build folder in the folder of the library, or in a private folder."""
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
    """Creates a folder for this process, used if the cache folder is not writable."""
    return Path(_private().name)


@functools.cache
def _private() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="amp_fx-")


def _command(name: str, source: Path, folder: str) -> tuple[tuple[str, ...], Path]:
    """Returns the compiler command and the file that it writes.

    Relies on inductor's ``CppBuilder`` and ``CppTorchOptions`` for the compiler and for torch's
    headers and libraries.
    """
    from amp_fx.torch_private.inductor_build import CppBuilder, CppTorchOptions, is_gcc

    options = CppTorchOptions(warning_all=False, include_pytorch=True)
    options._cflags = _portable_flags(options._cflags)
    if is_gcc():
        options._cflags += GCC_FLAGS
    libraries = [name for name in options._libraries if "omp" not in name]
    options._libraries = [*libraries, "torch_python", "c10"]
    builder = CppBuilder(name, str(source), options, folder)
    return tuple(shlex.split(builder.get_command_line())), Path(builder.get_target_file_path())


def _portable_flags(flags: Iterable[str]) -> list[str]:
    """Removes flags that optimize kernels and increase the build time.

    They would also make the library depend on the processor of the machine that built it
    (``-march=native``) or on libgomp (OpenMP).
    """
    removed = ("march=", "mcpu=", "mtune=", "g1", "gline-tables-only", "fopenmp", "openmp")
    remaining = [flag for flag in flags if not flag.startswith(removed)]
    return [OPTIMIZE if flag in ("O2", "O3") else flag for flag in remaining]


def _libraries(folder: Path, name: str) -> list[Path]:
    """Lists the built libraries of a module, including truncated files."""
    return sorted(folder.glob(f"{name}-*{SUFFIX}"))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _is_complete(path: Path) -> bool:
    try:
        return path.name.removesuffix(SUFFIX).endswith(f"-{_digest(path)}")
    except OSError:  # deleted or not readable
        return False
