"""The base of modes that can be paused."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from amp_fx.torch_private.modes import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator


class PausableMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that runs ops as they are while ``is_paused`` is True."""

    is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the mode in the context."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before
