"""The C++ extension that watches weights (``csrc/watch.cpp``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from amp_fx import csrc

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from amp_fx.csrc.engine import Engine


def engine() -> Engine:
    """Returns the extension module; call it only if ``is_available``."""
    return cast("Engine", csrc.load())


def is_available() -> bool:
    """Returns True if values can be cached, because the extension is built."""
    return csrc.load() is not None


def foreign(weights: Mapping[int, torch.Tensor]) -> list[int]:
    """Returns the positions of weights whose memory torch did not allocate.

    Other libraries and processes write to it unseen. Builds nothing: without the extension, nothing
    is cached anyway.
    """
    if not csrc.is_built() or not is_available():
        return []
    return [i for i, weight in weights.items() if engine().is_foreign(weight)]
