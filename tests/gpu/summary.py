"""``python -m tests.gpu.summary``: prints the report of ``make gpu`` from pytest's JUnit file."""

from __future__ import annotations

import os
import platform
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

OUTCOMES = ("passed", "failed", "skipped")


def report(path: Path) -> Iterator[str]:
    """Yields the lines of the report, as Markdown.

    Args:
        path: The file that ``pytest --junitxml`` wrote. It lacks the tests that did not end.
    """
    yield from ("# amp_fx on this machine", "", *(f"- {fact}" for fact in facts()), "")
    if not path.exists():
        yield f"pytest wrote no {path.name}."
        return
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    failures: list[str] = []
    for case in ET.parse(path).getroot().iterfind(".//testcase[@name]"):
        module, name = case.get("classname", ""), case.get("name", "")
        module = module.removeprefix("tests.gpu.") or name  # errors of collection have no module
        outcome, reason = outcome_of(case)
        counts[module][outcome] += 1
        seconds[module] += float(case.get("time", 0))  # type: ignore[assignment]
        if outcome == "failed":
            failures.append(f"- `{module}::{name}`: {reason}")
    yield from (f"| module | {' | '.join(OUTCOMES)} | seconds |", "|---|---:|---:|---:|---:|")
    for module, count in sorted(counts.items()):
        cells = [module, *(str(count[outcome]) for outcome in OUTCOMES), f"{seconds[module]:.0f}"]
        yield f"| {' | '.join(cells)} |"
    if failures:
        yield from ("", "## Failures", "", *failures)


def outcome_of(case: ET.Element) -> tuple[str, str]:
    """Returns the outcome of one test, and the first line of the reason."""
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return outcome, found.get("message", "").strip().partition("\n")[0]
    return "passed", ""


def facts() -> Iterator[str]:
    """Yields the versions and the devices of this machine."""
    yield f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield f"{torch.cuda.get_device_name(index)} ({major}.{minor})"
    if not torch.cuda.is_available():
        yield "no CUDA device: the tests that need one were skipped"


if __name__ == "__main__":
    sys.stdout.write("\n".join(report(Path(sys.argv[1]))) + "\n")
