"""Runs parts, each in a process, and keeps what came out of each."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tests.gpu.parts import Part

PASSED, FAILED, TIMED_OUT, NOT_RUN = "passed", "FAILED", "TIMED OUT", "not run"
TAIL = 60
"""Lines of output that are kept of a part that did not pass."""
LEAST = 10.0
"""Seconds: no part is begun that has less."""
GRACE = 5.0
"""Seconds between asking a process to end and ending it."""


@dataclasses.dataclass
class Outcome:
    """What came out of one part.

    Attributes:
        name: The part's.
        about: The part's.
        status: ``"passed"``, ``"FAILED"``, ``"TIMED OUT"`` or ``"not run"``.
        seconds: How long it took.
        detail: Counts, or why it did not run.
        failures: Tests that failed, with the first line of the reason.
        figures: What it measured, as the part wrote it.
        tail: The end of its output, if it did not pass.
    """

    name: str
    about: str
    status: str
    seconds: float = 0.0
    detail: str = ""
    failures: list[str] = dataclasses.field(default_factory=list)
    figures: Any = None
    tail: list[str] = dataclasses.field(default_factory=list)


def run_parts(
    parts: Sequence[Part],
    *,
    has_cuda: bool,
    budget: float,
    jobs: int,
    environment: Mapping[str, str],
    told: Callable[[str], None],
    finished: Callable[[list[Outcome]], None],
) -> list[Outcome]:
    """Runs what can run, until the time is used up: first the tests, then what is timed.

    Args:
        parts: What to run, in order.
        has_cuda: Whether there is a device.
        budget: Seconds for all of them.
        jobs: How many parts run at the same time, unless they are timed.
        environment: Of the processes.
        told: Given each line, as it is printed.
        finished: Given all outcomes so far after each part.
    """
    end = time.monotonic() + budget
    outcomes: list[Outcome] = []
    lock = threading.Lock()

    def run(part: Part) -> None:
        missing = part.missing(has_cuda=has_cuda)
        left = end - time.monotonic()
        if missing is None and left < min(part.seconds, LEAST):
            missing = "out of time"
        if missing is not None:
            outcome = Outcome(part.name, part.about, NOT_RUN, detail=missing)
        else:
            told(f"{part.name}: {part.about}")
            variables = {**environment, **part.environment}
            outcome = _run(part, min(part.seconds, left), variables, told)
        with lock:
            outcomes.append(outcome)
            what = f"{outcome.status}, {outcome.detail} ({outcome.seconds:.0f} s)"
            told(f"[{len(outcomes)}/{len(parts)}] {part.name}: {what}")
            finished(outcomes)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, [part for part in parts if not part.is_timed]))
    for part in parts:
        if part.is_timed:
            run(part)
    return outcomes


def _run(
    part: Part, limit: float, environment: Mapping[str, str], told: Callable[[str], None]
) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        start = time.monotonic()
        command = part.command(str(result))
        code, lines = _run_process(part.name, command, limit, environment, told)
        outcome = Outcome(part.name, part.about, PASSED, time.monotonic() - start)
        try:
            _read(outcome, part.kind, result)
        except Exception as error:  # noqa: BLE001, a file that is cut off or of another shape
            outcome.detail = f"its results cannot be read ({type(error).__name__})"
        if code is None:
            outcome.status = TIMED_OUT
            outcome.detail = f"ended after {limit:.0f} s {outcome.detail}".strip()
        elif code != 0:
            outcome.status = FAILED
            outcome.detail = f"exit code {code} {outcome.detail}".strip()
        if outcome.status != PASSED:
            outcome.tail = list(lines)
        return outcome


def _run_process(
    name: str,
    command: Sequence[str],
    limit: float,
    environment: Mapping[str, str],
    told: Callable[[str], None],
) -> tuple[int | None, collections.deque[str]]:
    """The exit code, None if it ran out of time, and the end of the output."""
    lines: collections.deque[str] = collections.deque(maxlen=TAIL)
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=dict(environment),
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it starts can be ended with it
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            told(f"    {name}: {line.rstrip()}")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code: int | None = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process)
        reader.join(timeout=GRACE)
        if process.stdout is not None and not reader.is_alive():
            process.stdout.close()
    return code, lines


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process and all that it started and left running.

    An interrupt comes first: pytest then writes the results that it has.
    """
    process.send_signal(signal.SIGINT)  # does nothing if it has ended
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE)
    for ending in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, ending)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE)


def _read(outcome: Outcome, kind: str, result: Path) -> None:
    if kind == "program" or not result.exists():
        return
    if kind == "pytest":
        _read_tests(outcome, result)
        return
    outcome.figures = json.loads(result.read_text())
    keys = ("comparisons", "rows", "timings")
    num_rows = sum(len(outcome.figures.get(key, ())) for key in keys)
    outcome.detail = f"{num_rows} comparisons"


def _read_tests(outcome: Outcome, result: Path) -> None:
    cases = list(ET.parse(result).getroot().iter("testcase"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    outcome.failures = list(_failures(cases))
    num_passed = len(cases) - skipped - len(outcome.failures)
    outcome.detail = f"{num_passed} passed, {len(outcome.failures)} failed, {skipped} skipped"
    if cases and skipped == len(cases):
        why = {skip.get("message", "") for case in cases for skip in case.iter("skipped")}
        outcome.status, outcome.detail = NOT_RUN, "; ".join(sorted(why))
    noted = {
        f"{case.get('name')}: {item.get('name')}": item.get("value")
        for case in cases
        for item in case.iter("property")
    }
    outcome.figures = noted or None


def _failures(cases: Sequence[ET.Element]) -> Iterator[str]:
    for case in cases:
        for kind in ("failure", "error"):
            found = case.find(kind)
            if found is not None:
                reason = (found.get("message") or "").strip().partition("\n")[0]
                yield f"{case.get('classname')}::{case.get('name')}: {reason}"
                break
