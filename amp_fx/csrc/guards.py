"""Device guards for fake tensors on devices that this build of torch lacks."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from amp_fx.csrc import build

NAME = "amp_fx_guard"
SOURCE = Path(__file__).with_name("guard.cpp")


@functools.cache
def add_guards() -> None:
    """Adds the guards that are missing, for the rest of the process.

    Raises:
        UnsupportedError: ``guard.cpp`` cannot be compiled.
    """
    path = build.find(NAME, SOURCE) or build.start(NAME, SOURCE).result()
    ctypes.CDLL(str(path)).amp_fx_add_guards()
