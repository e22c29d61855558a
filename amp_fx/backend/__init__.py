"""The Dynamo backend.

Dynamo calls ``entry`` with a captured graph. ``rewrite`` runs the passes of ``pipeline``, ``inner``
compiles the result, ``caching`` decides which values of weights are cached, and ``fallback`` runs
graphs that cannot be rewritten or compiled.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "amp_fx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from amp_fx.backend import entry

    # At the first lookup, not on import: explain and others import the entry, and change nothing.
    entry.prepare_torch()
    return entry.amp_fx
