"""The compiled part of the cache: ``watch.cpp``, built on first use and kept on disk.

Where it cannot be built (no compiler, an unknown torch), ``load`` gives None, and the Python
classes of ``amp_fx.weights.python_watch`` do the same, slower and with copy-on-write storages.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

MODULE = "amp_fx_watch"
SOURCE = Path(__file__).with_name("watch.cpp")
SWITCH = "AMP_FX_NATIVE"
"""Environment variable; ``0`` has the Python classes used."""


@functools.cache
def load() -> Any:
    """The extension module; None if there is none.

    The first call on a machine compiles it, some 20 seconds.
    """
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()  # which orders what it does
    if os.environ.get(SWITCH) == "0" or not has_gil:
        return None
    try:
        module = _import(_built())
    except Exception as error:
        log.debug("no compiled part", exc_info=True)
        log.info("watching weights in Python, as watch.cpp cannot be built: %s", error)
        return None
    return module


def _built() -> Path:
    """The path of the library, which is there afterwards.

    Relies on inductor's ``CppBuilder`` and ``CppTorchOptions`` to know the compiler, and
    torch's headers and libraries.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "amp_fx" / _key()
    path = folder / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # Two processes that build at once each finish their own; the later one stays.
            Path(_compiled(scratch)).replace(path)
    return path


def _compiled(folder: str) -> str:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

    options = CppTorchOptions(warning_all=False, include_pytorch=True)
    options._libraries.append("torch_python")
    builder = CppBuilder(MODULE, str(SOURCE), options, folder)
    log.info("building %s, once on this machine", SOURCE.name)
    builder.build()
    return builder.get_target_file_path()


def _key() -> str:
    """What the library depends on: source, torch, Python."""
    versions = f"{torch.__version__} {torch.__file__} {sys.version} {sys.executable}"
    return hashlib.sha256(SOURCE.read_bytes() + versions.encode()).hexdigest()[:16]


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
