"""A line on the terminal that says what a long call is doing."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SWITCH = "AMP_FX_PROGRESS"
DELAY = 2.0
"""Seconds before the line appears."""

_LOCK = threading.RLock()
_STEPS: list[str] = []


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Shows what the calling thread does on a terminal's last line, if it takes two seconds.

    Inside of another ``working``, it adds to what that says. Nothing is written where stderr is not
    a terminal, under pytest, next to the messages of ``TORCH_LOGS``, by other threads than the
    first, by other local ranks than 0, and with ``AMP_FX_PROGRESS=0``.
    """
    if not _is_wanted() or not _LOCK.acquire(blocking=False):
        yield
        return
    _STEPS.append(what)
    try:
        with contextlib.nullcontext() if len(_STEPS) > 1 else _line():
            yield
    finally:
        _STEPS.pop()
        _LOCK.release()


def _is_wanted() -> bool:
    env = os.environ
    if env.get(SWITCH) == "0" or env.get("LOCAL_RANK", "0") != "0" or env.get("TERM") == "dumb":
        return False
    if "PYTEST_CURRENT_TEST" in env or "TORCH_LOGS" in env:
        return False
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


@contextlib.contextmanager
def _line() -> Iterator[None]:
    """Shows ``_STEPS``; stdout and stderr stay the program's, which may have replaced them."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    began = time.monotonic()

    def text() -> Text:
        seconds = time.monotonic() - began
        line = f"amp_fx ({seconds:.0f} s): {', '.join(_STEPS)}"
        return Text(line, style="dim", no_wrap=True, overflow="ellipsis")

    live = Live(
        get_renderable=text,
        console=Console(stderr=True, force_jupyter=False),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    timer = threading.Timer(DELAY, live.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        with contextlib.suppress(OSError):  # the terminal is gone
            live.stop()
