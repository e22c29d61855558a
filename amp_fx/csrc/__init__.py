"""The compiled part, built on first use and kept on disk (``amp_fx.csrc.build``).

``watch.cpp`` watches weights, and ``rows.cpp`` has the kernels of ``numerics="invariant"``. Where a
part cannot be built (no compiler, torch before 2.13), ``load`` and ``load_rows`` return None.
Weights are then cast on every call, and the mode raises an error.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.csrc import build
from amp_fx.progress import working

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import ModuleType

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "watch.cpp"
ROWS_SOURCE = FOLDER / "rows.cpp"
SWITCH = "AMP_FX_NATIVE"
"""Environment variable; ``0`` has Python do all."""


def parts() -> dict[str, Path]:
    """Returns the source of each compiled part, by the name of its module."""
    return {"amp_fx_watch": SOURCE, "amp_fx_rows": ROWS_SOURCE}


def why_off() -> str:
    """Returns why nothing compiled is to be used; an empty string if it is to be.

    The compiled parts rely on the GIL to order what they do.
    """
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        return "torch before 2.13 has no hook on storages"
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return "" if has_gil else "this Python runs without the GIL"


def start() -> None:
    """Starts to build what looks at weights, if it is not on disk, and returns at once.

    The compiler is a process of its own, which a thread waits for. It runs beside all that this
    process does until ``load`` is first called, so the backend calls this first, and ``load``
    late. A failure is not reported here: ``load`` reports it.
    """
    if why_off():
        return
    try:
        with _state.lock:
            if "amp_fx_watch" not in _state.started and build.find("amp_fx_watch", SOURCE) is None:
                _state.started["amp_fx_watch"] = build.start("amp_fx_watch", SOURCE)
    except Exception:
        log.debug("not started", exc_info=True)


@functools.cache
def load() -> Any:
    """Returns the module of ``watch.cpp``; None if there is none.

    The first call on a machine waits for the compiler, some 10 seconds.
    """
    return _load("amp_fx_watch", SOURCE)


@functools.cache
def load_rows() -> Any:
    """Returns the module of ``rows.cpp``, which registers ops; None if there is none."""
    return _load("amp_fx_rows", ROWS_SOURCE)


def _load(name: str, source: Path) -> Any:
    if why_off():
        return None
    try:
        return imported(name, source)
    except Exception as error:
        log.debug("no compiled part", exc_info=True)
        log.info("continuing without %s, which cannot be built: %s", source.name, error)
        return None


class _State:
    """The state that threads share."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts afresh, as in a forked process: it has no thread that builds."""
        self.lock = threading.Lock()
        self.started: dict[str, Future[Path]] = {}


_state = _State()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_state.reset)


def imported(name: str, source: Path) -> ModuleType:
    """Imports a part, and builds it first if it is not on disk.

    Raises:
        UnsupportedError: It cannot be built.
        ImportError: It can be built, and not be imported.
    """
    with _state.lock:
        return _imported(name, source)


def _imported(name: str, source: Path) -> ModuleType:
    building = _state.started.pop(name, None)
    found = build.find(name, source) if building is None else None
    if found is not None:
        try:
            return _import(name, found)
        except ImportError as error:  # built against a newer C library, for example
            log.info("building %s again: %s", source.name, error)
    building = building or build.start(name, source, rejected=found)
    with working(f"building {source.name}, once on this machine"):
        return _import(name, building.result())


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
