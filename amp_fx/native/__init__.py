"""The compiled parts, built on first use and kept on disk.

``watch.cpp`` looks at weights, ``kernels.cpp`` calls kernels without the GIL. Where a part
cannot be built (no compiler, an unknown torch), ``load`` and ``load_kernels`` give None, and
Python does the same: slower (``amp_fx.weights.python_watch``), or with less safety next to
other threads (``amp_fx.regions.kernels``).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "watch.cpp"
KERNELS_SOURCE = FOLDER / "kernels.cpp"
SWITCH = "AMP_FX_NATIVE"
"""Environment variable; ``0`` has Python do all."""


@functools.cache
def load() -> Any:
    """The module of ``watch.cpp``; None if there is none.

    The first call on a machine compiles it, some 20 seconds.
    """
    return _load("amp_fx_watch", SOURCE)


@functools.cache
def load_kernels() -> Any:
    """The module of ``kernels.cpp``; None if there is none. It takes as long to compile."""
    return _load("amp_fx_kernels", KERNELS_SOURCE)


def _load(name: str, source: Path) -> Any:
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()  # which orders what they do
    if os.environ.get(SWITCH) == "0" or not has_gil:
        return None
    try:
        with _lock:
            return _import(name, _built(name, source))
    except Exception as error:
        log.debug("no compiled part", exc_info=True)
        log.info("going on in Python, as %s cannot be built: %s", source.name, error)
        return None


_lock = threading.Lock()


def _built(name: str, source: Path) -> Path:
    """The path of the library, which is there afterwards.

    Relies on inductor's ``CppBuilder`` and ``CppTorchOptions`` to know the compiler, and
    torch's headers and libraries.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "amp_fx" / _key(source)
    path = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # Two processes that build at once each finish their own; the later one stays.
            Path(_compiled(name, source, scratch)).replace(path)
    return path


def _compiled(name: str, source: Path, folder: str) -> str:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

    options = CppTorchOptions(warning_all=False, include_pytorch=True)
    options._libraries.append("torch_python")
    builder = CppBuilder(name, str(source), options, folder)
    log.info("building %s, once on this machine", source.name)
    builder.build()
    return builder.get_target_file_path()


def _key(source: Path) -> str:
    """What a library depends on: source, torch, Python."""
    versions = f"{torch.__version__} {torch.__file__} {sys.version} {sys.executable}"
    return hashlib.sha256(source.read_bytes() + versions.encode()).hexdigest()[:16]


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
