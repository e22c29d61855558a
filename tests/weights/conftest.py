"""Fixtures of all tests of cached values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from amp_fx import weight_cache

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    """No test sees what another one cached, or its limit."""
    weight_cache.clear()
    yield
    weight_cache.set_limit(None)
    weight_cache.clear()
