"""A progress line on the terminal for long calls."""

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
def working(step: str) -> Iterator[None]:
    """Context that shows ``step`` on the last line of the terminal after two seconds.

    A nested context adds its step to the line. Nothing is shown if stderr is not a terminal, under
    pytest, with ``TORCH_LOGS`` or ``AMP_FX_PROGRESS=0``, on local ranks other than 0, or if another
    thread already shows a line.
    """
    if not _is_wanted() or not _LOCK.acquire(blocking=False):
        yield
        return
    _STEPS.append(step)
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
    except (AttributeError, ValueError):  # stderr is None or closed
        return False


@contextlib.contextmanager
def _line() -> Iterator[None]:
    """Context that shows ``_STEPS``. Does not redirect stdout and stderr of the program."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    start = time.monotonic()

    def text() -> Text:
        seconds = time.monotonic() - start
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
        with contextlib.suppress(OSError):  # the terminal was closed
            live.stop()
