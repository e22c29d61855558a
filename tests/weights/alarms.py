"""Collects what amp_fx says about weights, however it says it."""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Collector(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def alarms() -> Iterator[list[str]]:
    """The messages of Python warnings and of warnings that the ``amp_fx`` loggers were told."""
    messages: list[str] = []
    collector, logger = _Collector(messages), logging.getLogger("amp_fx")
    logger.addHandler(collector)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield messages
        messages += [str(warning.message) for warning in caught]
    finally:
        logger.removeHandler(collector)
