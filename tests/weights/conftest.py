"""Fixtures of all tests of cached values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from amp_fx import weight_cache
from amp_fx.passes import leave_small_products

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    """No test sees what another one cached, or its limit."""
    weight_cache.clear()
    yield
    weight_cache.set_limit(None)
    weight_cache.clear()


@pytest.fixture(autouse=True)
def _small_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models stand for large ones, whose products are packed."""
    monkeypatch.setattr(leave_small_products, "MAX_MULTIPLICATIONS", 0)
    monkeypatch.setattr(leave_small_products, "MAX_FLOAT32_WEIGHTS", 0)
