"""``python -m amp_fx build``: builds the C++ extension ahead of time."""

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
    """Builds the extension unless it exists; returns 1 if that fails, else 0."""
    if csrc.why_off():
        sys.stderr.write(f"amp_fx build: nothing was built: {csrc.why_off()}\n")
        return 1
    try:
        _build(csrc.NAME, csrc.SOURCE)
    except (UnsupportedError, ImportError) as error:
        sys.stderr.write(f"amp_fx build: {error}\n")
        return 1
    return 0


def _build(name: str, source: Path) -> None:
    """Builds the extension unless it exists, and prints its path.

    Raises:
        UnsupportedError: The extension cannot be built, or the cache folder is not writable.
        ImportError: The extension was built but cannot be imported.
    """
    start = time.perf_counter()
    existing = find(name, source)
    path = Path(str(csrc.imported(name, source).__file__))
    seconds = time.perf_counter() - start
    if not path.is_relative_to(cache_folder()):
        raise UnsupportedError(
            f"the folder {cache_folder()} is not writable: set {FOLDER_VARIABLE} to another one"
        )
    outcome = "exists" if path == existing else f"built in {seconds:.1f} s"
    sys.stdout.write(f"{source.name}: {outcome}, {path}\n")
