"""The device of ``docs/examples/my_device``: compiled C++, and autocast from Python."""

from __future__ import annotations

import pytest

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from tests.in_forks import failures_of
from tests.regions.device_programs import EXAMPLES, PROGRAMS

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of("tests.regions.device_programs")


@pytest.mark.parametrize("name", PROGRAMS)
def test_on_the_device(name: str, failures: dict[str, str]) -> None:
    assert failures.get(name, "ended its process") == ""


def test_the_device_is_small_enough_to_read() -> None:
    text = (EXAMPLES / "my_device/device.cpp").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
