"""What tests are skipped without."""

from __future__ import annotations

import pytest

from amp_fx.inner import has_cpp_compiler
from amp_fx.weights.engine import engine

HOOK = pytest.mark.skipif(not engine().has_hook, reason="wants torch's hook on storages, of 2.13")
FROZEN_GRAPHS = pytest.mark.skipif(
    not has_cpp_compiler() or not engine().has_hook,
    reason="frozen graphs want a C++ compiler and torch's hook on storages, new in 2.13",
)
