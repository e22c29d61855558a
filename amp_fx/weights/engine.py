"""What looks at weights: the compiled classes where they can be built, else those in Python."""

from __future__ import annotations

import functools
from typing import Any

from amp_fx import native
from amp_fx.weights import python_watch


@functools.cache
def engine() -> Any:
    """The module with ``Copy``, ``Look`` and the functions on tensors: see ``python_watch``."""
    return native.load() or python_watch
