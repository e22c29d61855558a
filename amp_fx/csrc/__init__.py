"""The C++ extension ``watch.cpp``, built on first use and cached on disk (``amp_fx.csrc.build``).

If it cannot be built because there is no compiler, ``load`` returns None. Every call then casts the
weights again.
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

from amp_fx.csrc import build
from amp_fx.progress import working

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import ModuleType

log = logging.getLogger(__name__)

NAME = "amp_fx_watch"
"""Name of the extension module."""

SOURCE = Path(__file__).parent / "watch.cpp"
SWITCH = "AMP_FX_NATIVE"
"""Environment variable; ``0`` disables the extension."""


def why_off() -> str:
    """Returns the reason why the extension is disabled; empty if it is enabled."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    # The extension relies on the GIL for mutual exclusion.
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return "" if has_gil else "this Python runs without the GIL"


def is_built() -> bool:
    """Returns True if ``load`` returns the module without waiting for a compiler."""
    return not why_off() and build.find(NAME, SOURCE) is not None


def start() -> None:
    """Starts building ``watch.cpp`` in the background, unless it is on disk.

    The compiler runs in another process until ``load`` needs the result, so the backend calls this
    function first and ``load`` as late as possible. Failures are reported by ``load``.
    """
    if why_off():
        return
    try:
        with _state.lock:
            if NAME not in _state.started and build.find(NAME, SOURCE) is None:
                _state.started[NAME] = build.start(NAME, SOURCE)
    except Exception:
        log.debug("could not start building watch.cpp", exc_info=True)


@functools.cache
def load() -> Any:
    """Returns the module of ``watch.cpp``; None if it is unavailable.

    The first call on a machine waits about 10 seconds for the compiler.
    """
    if why_off():
        return None
    try:
        return imported(NAME, SOURCE)
    except Exception as error:
        log.debug("could not load %s", SOURCE.name, exc_info=True)
        log.info("continuing without %s, which cannot be built: %s", SOURCE.name, error)
        return None


class _BuildState:
    """State that threads share."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Resets the state; called in forked processes, where building threads do not exist."""
        self.lock = threading.Lock()
        self.started: dict[str, Future[Path]] = {}


_state = _BuildState()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_state.reset)


def imported(name: str, source: Path) -> ModuleType:
    """Imports an extension, and builds it first if it is not on disk.

    Raises:
        UnsupportedError: The extension cannot be built.
        ImportError: The extension was built but cannot be imported.
    """
    with _state.lock:
        building = _state.started.pop(name, None)
        path = build.find(name, source) if building is None else None
        if path is not None:
            try:
                return _import(name, path)
            except ImportError as error:  # built against a newer C library, for example
                log.info("building %s again: %s", source.name, error)
        building = building or build.start(name, source, rejected=path)
        with working(f"building {source.name}, once on this machine"):
            return _import(name, building.result())


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
