"""``python -m amp_fx build``: builds the compiled parts ahead of time."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from amp_fx import csrc
from amp_fx.csrc.build import FOLDER_VARIABLE, cache_folder, find
from amp_fx.errors import UnsupportedError

if TYPE_CHECKING:
    import argparse


def run(_: argparse.Namespace) -> int:
    """Builds what is missing and prints where it is; returns 1 if that fails, else 0."""
    if csrc.why_off():
        sys.stderr.write(f"amp_fx build: nothing is built: {csrc.why_off()}\n")
        return 1
    try:
        for name, source in csrc.parts().items():
            _build(name, source)
    except (UnsupportedError, ImportError) as error:
        sys.stderr.write(f"amp_fx build: {error}\n")
        return 1
    return 0


def _build(name: str, source: Path) -> None:
    """Builds one part unless it is there, and prints where it is.

    Raises:
        UnsupportedError: It cannot be built, or not be kept.
        ImportError: It is built, and cannot be imported.
    """
    begin = time.perf_counter()
    found = find(name, source)
    path = Path(str(csrc.imported(name, source).__file__))
    seconds = time.perf_counter() - begin
    if not path.is_relative_to(cache_folder()):
        raise UnsupportedError(f"{cache_folder()} cannot be written ({FOLDER_VARIABLE})")
    how = "was there" if path == found else f"built in {seconds:.1f} s"
    sys.stdout.write(f"{source.name}: {how}, {path}\n")
