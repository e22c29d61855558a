"""Threads that call one model with tied weights, and write it: no crash and no wrong number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.weights.watch import is_available

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")
ROOT = Path(__file__).resolve().parents[2]
FROZEN = ("read --frozen", "data --frozen") if is_available() else ()
SCENARIOS = ("read", "data", *FROZEN, "data --grad", "optimizer --grad", "hogwild")


def run_program(*scenarios: str, seconds: int, cache: bool = True) -> None:
    """Runs scenarios in one process, one after the other; the last two seconds without writes."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.weights.stress_program"]
    options = [*scenarios, "--seconds", str(seconds), *([] if cache else ["--no-cache"])]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    shown = f"{scenarios} exited with {done.returncode}\n{done.stdout}{done.stderr[-6000:]}"
    assert done.returncode == 0, shown
    counts = map(json.loads, done.stdout.splitlines()[-len(scenarios) :])
    for scenario, count in zip(scenarios, counts, strict=True):
        assert count["calls"] > 100, shown
        assert count["writes"] > 10 or scenario.startswith("read"), shown
        assert count["undisturbed"] > 50 or scenario == "hogwild", shown


@pytest.mark.slow
def test_a_few_seconds() -> None:
    """All in one process: what a process takes to start is longer than what is looked at."""
    run_program(*SCENARIOS, seconds=4)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_minute(scenario: str) -> None:
    run_program(scenario, seconds=60)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_program_finds_nothing_without_kept_casts(scenario: str) -> None:
    run_program(scenario, seconds=5, cache=False)
