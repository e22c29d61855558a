"""Fixtures of all tests."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from amp_fx.backend import fallback
from amp_fx.devices import wide_products

with contextlib.suppress(ImportError):  # where `make gpu` runs, it may be missing
    import hypothesis  # noqa: F401 - it warns if its plugins are imported when objects are frozen

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure() -> None:
    """Makes reports as wide as in a pipe: folded lines would hide the words that tests look for."""
    os.environ.pop("COLUMNS", None)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what ``one_in`` leaves to ``make slow``."""
    num_cases: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("one_in")
        if sampled is None or item.get_closest_marker("slow") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        if num_cases[test] % sampled.args[0]:
            item.add_marker(pytest.mark.slow)
        num_cases[test] += 1


def pytest_collection_finish() -> None:
    """Spares the collector what all test modules have imported: it took a third of some tests.

    Half a million objects stay for good. What a test leaves is collected later, too: compiling
    makes that many objects that a collection every 700 of them finds next to nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    # From loggers that do not propagate, pytest collects records by handlers of its own. If this
    # one has a handler, torch writes down each graph that it compiles: a tenth of the time.
    logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """Spares the collector what a module has imported and compiled: tests collect often."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Resets Dynamo before each test, and checks that the test leaves autocast switched off."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        # Dynamo flushes the CPU's caches to time the guards, which adds 28 ms to every capture.
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")


@pytest.fixture(autouse=True)
def _no_fallback(request: pytest.FixtureRequest) -> Iterator[None]:
    """No graph is left as it was, or runs op by op, unless a test asks for it (``falls_back``)."""
    fallback._seen.clear()
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[assignment,method-assign]
    fallback.log.addHandler(handler)
    yield
    fallback.log.removeHandler(handler)
    if request.node.get_closest_marker("falls_back") is None:
        assert not records, [record.getMessage() for record in records]


@pytest.fixture
def _low_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products run in low precision on any CPU, as if nothing was known about its units."""
    monkeypatch.setattr(wide_products, "has_product_kernels", lambda _: None)


@pytest.fixture
def rng() -> torch.Generator:
    """Random numbers that are the same in every run."""
    return torch.Generator().manual_seed(1234)
