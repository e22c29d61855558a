"""Faults of cached values: each removes one protection; a few have a second one.

As a plugin of pytest, ``-p tests.weights.planted`` plants the fault that ``PLANT`` names::

    PLANT=version python -m pytest -p tests.weights.planted -x tests/weights/test_cached_values.py
"""

from __future__ import annotations

import collections
import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_fx import csrc
from amp_fx.backend import lower
from amp_fx.passes import pack_for_kernels, protect_saved_inputs
from amp_fx.passes.base import PassResult
from amp_fx.passes.constants_to_inputs import ConstantsToInputs
from amp_fx.weights import inputs, pack, plan, prepare, store, write_signals

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = csrc.SOURCE
"""The sound source: ``plant`` replaces it."""

IN_CPP: dict[str, tuple[str, str]] = {
    "version": ("version_of(weight) == version;", "true;"),
    "count of writes": ("seen != 0 && seen == record->writes &&", "seen != 0 &&"),
    "hook": ("!record->is_distrusted && is_hooked(storage) &&", "!record->is_distrusted &&"),
    "storage": (
        "unsafeGetStorageImpl() == storage &&\n        data_of(weight) == data &&",
        "true &&",
    ),
    "place in storage": ("data_of(weight) == data &&", ""),
    "layout": ("weight.sizes() == sizes &&\n        weight.strides() == strides &&", ""),
    "start": ("? next_seen : 0;", "? record->writes.load() : 0;"),
    "writes in progress": ("&& !record->may_be_in_progress() ?", "?"),
    "sample": ("is_equal = read(next) == bits[turn];", "is_equal = true;"),
    "sampled elements": ("turn = turn + 1 < bits.size() ? turn + 1 : 0;", ""),
    "value in use": ("return storage.use_count() > (has_idle_object ? 2 : 1);", "return false;"),
    "any use": ("&& !is_in_use(slot->value)", ""),
    "running calls": ("num_in_flight == 0 && has_value(slot)", "has_value(slot)"),
    "bound code": ("(cache->num_constants == 0 || set->has_code())", "true"),
    "memory of others": ("return c10::impl::cow::has_simple_data_ptr(storage);", "return true;"),
    "list ops": ("if (!kernels->empty()) {", "if (true) {"),
}
"""In ``watch.cpp``: a text, and what replaces it."""


@contextlib.contextmanager
def _unlocked(*_: Any, **__: Any) -> Iterator[bool]:
    yield True


IN_PYTHON: dict[str, list[tuple[Any, str, Any]]] = {
    "lock": [(store.Store, "locked", _unlocked)],
    "optimizer steps": [(write_signals, "_watch_steps", lambda: None)],
    "refilled memory": [(store, "_can_refill", lambda *_: True)],
    "freed weights": [(store.Store, "_on_weight_freed", lambda *_: None)],
    "swapped tensors": [(store, "forget", lambda _: None)],
    "donated": [(protect_saved_inputs, "keep_saved", lambda _: None)],
    "constants": [(ConstantsToInputs, "call", lambda *_: PassResult(collections.Counter()))],
    "returned copies": [(pack_for_kernels, "_separate_outputs", lambda *_: None)],
    "escaping values": [(m, "escaping", lambda *_: set()) for m in (lower, pack, plan)],
    "written weights": [(inputs, "is_written", lambda _: False)],
    "key of a value": [(prepare.CachedValueSpec, "key", lambda self, _: self.positions)],
}
"""Attributes, and what replaces them."""

PLANTED = (*IN_CPP, *IN_PYTHON)


def plant(name: str) -> None:
    """Plants a fault in this process."""
    for owner, attribute, value in IN_PYTHON.get(name, []):
        assert hasattr(owner, attribute), attribute
        setattr(owner, attribute, value)
    if name in IN_CPP:
        before, after = IN_CPP[name]
        source = SOURCE.read_text()
        assert source.count(before) == 1, before
        csrc.SOURCE = Path(tempfile.mkdtemp()) / SOURCE.name
        csrc.SOURCE.write_text(source.replace(before, after))


def pytest_configure() -> None:
    plant(os.environ["PLANT"])
