"""The Dynamo backend: from a captured graph to what Dynamo calls.

``entry`` is where Dynamo comes in. ``rewrite`` runs the passes of ``pipeline``; ``freezing`` and
``inner`` hand graphs to inductor; ``fallback`` says what could not be compiled.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "amp_fx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from amp_fx.backend.entry import amp_fx

    return amp_fx
