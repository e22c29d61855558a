"""``python -m tests.traffic step``: what an optimizer's step moves, against counts by hand."""

from __future__ import annotations

import pytest

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from tests.traffic.step import count

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")


def test_bytes_of_a_step_are_those_by_hand() -> None:
    """Inductor takes a copy, which is only written, for read as well: 2 bytes."""
    found = {way: num_bytes for way, (num_bytes, _) in count("SGD, momentum", "cpu", 1).items()}
    weight, momentum, norm, grad, copy = 4 + 4, 4 + 4, 4, 4, 2 + 2
    update = weight + momentum + grad
    assert found["in two passes"] == pytest.approx(norm + update, abs=0.01)
    assert found["in two passes, with a copy of each weight"] == pytest.approx(
        norm + update + copy, abs=0.01
    )
