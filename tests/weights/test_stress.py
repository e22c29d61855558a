"""Threads that call one model with tied weights, and write it: no crash and no wrong number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from amp_fx.inner import has_cpp_compiler

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler")
ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = {
    "read": 5,
    "data": 5,
    "read --frozen": 4,
    "data --frozen": 5,
    "optimizer --grad": 4,
    "hogwild": 2,
}
"""Seconds that each takes in the normal suite; the last two of a writer's are without writes."""


def run_program(scenario: str, *, seconds: int, cache: bool = True) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.weights.stress_program"]
    options = [*scenario.split(), "--seconds", str(seconds), *([] if cache else ["--no-cache"])]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    shown = f"{scenario} exited with {done.returncode}\n{done.stdout}{done.stderr[-6000:]}"
    assert done.returncode == 0, shown
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["calls"] > 100, shown
    assert counts["writes"] > 10 or scenario.startswith("read"), shown
    assert counts["undisturbed"] > 50 or scenario == "hogwild", shown


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_few_seconds(scenario: str) -> None:
    run_program(scenario, seconds=SCENARIOS[scenario])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_minute(scenario: str) -> None:
    run_program(scenario, seconds=60)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_program_finds_nothing_without_kept_casts(scenario: str) -> None:
    run_program(scenario, seconds=5, cache=False)
