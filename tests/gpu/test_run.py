"""``make gpu``: parts in processes of their own, with limits, and a report of what came out.

Its parts for a device are tried on one alone; here are stub parts, and one that needs none.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils import benchmark

from benchmarks.comparison import Comparison
from tests.gpu import run
from tests.gpu.parts import KINDS, PARTS, Part
from tests.gpu.run import environment, main, site_folder
from tests.gpu.runner import FAILED, NOT_RUN, PASSED, TIMED_OUT
from tests.traffic import command
from tests.traffic.totals import Totals

if TYPE_CHECKING:
    from pathlib import Path


def program(name: str, text: str, *, seconds: int = 30, needs_cuda: bool = False) -> Part:
    return Part(name, f"a stub, {name}", "program", ("-c", text), seconds, needs_cuda=needs_cuda)


def report(folder: Path, *parts: Part, code: int = 0, arguments: tuple[str, ...] = ()) -> Any:
    """Runs parts, and gives the outcomes by name, and the report as text."""
    out = folder / "report"
    assert main(["--out", str(out), *arguments], parts) == code
    data = json.loads(out.with_suffix(".json").read_text())
    text = out.with_suffix(".md").read_text()
    return {part["name"]: part for part in data["parts"]}, text


def test_it_goes_on_after_parts_that_fail_hang_or_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (
        program("fails", "import sys; print('before it fell'); sys.exit(3)"),
        program("hangs", "import time; print('waiting', flush=True); time.sleep(60)", seconds=2),
        program("crashes", "import os; os.abort()"),
        program("well", "print('all is well')"),
    )
    start = time.monotonic()
    found, text = report(tmp_path, *parts, code=1)
    assert time.monotonic() - start < 40
    statuses = {name: part["status"] for name, part in found.items()}
    assert statuses == {"fails": FAILED, "hangs": TIMED_OUT, "crashes": FAILED, "well": PASSED}
    assert "exit code 3" in found["fails"]["detail"]
    assert found["fails"]["tail"] == ["before it fell"]
    assert found["hangs"]["tail"][0] == "waiting"
    assert "| hangs | TIMED OUT | ended after 2 s |" in text
    printed = capsys.readouterr().out
    assert printed.index("before it fell") < printed.index("all is well")


def test_parts_for_a_device_are_left_out_without_one(tmp_path: Path) -> None:
    part = program("device", "", needs_cuda=True)
    lacking = Part("lacking", "", "program", ("-c", ""), 9, needs_cuda=False, modules=("no_such",))
    found, text = report(tmp_path, lacking, part)
    assert found["lacking"]["detail"] == "no no_such"
    if found["device"]["status"] == NOT_RUN:
        assert found["device"]["detail"] == "no CUDA"
        assert "none: only parts that need no CUDA" in text


BEGINS_AND_ENDS = """
import pathlib, sys, time

folder, name, companion = pathlib.Path(sys.argv[1]), *sys.argv[2:4]
(folder / f"{name}.begun").touch()
for _ in range(6000 if companion else 30):
    begun = {path.stem for path in folder.glob("*.begun")} - {name}
    running = begun - {path.stem for path in folder.glob("*.ended")}
    if companion and companion in begun:
        break
    if not companion and running:
        sys.exit(f"{running} run at the same time")
    time.sleep(0.01)
else:
    if companion:
        sys.exit(f"{companion} waits")
(folder / f"{name}.ended").touch()
"""


def test_tests_share_the_machine_and_what_is_timed_has_it_alone(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(BEGINS_AND_ENDS)

    def part(name: str, kind: str, companion: str) -> Part:
        arguments = (str(program), str(tmp_path), name, companion)
        return Part(name, "", kind, arguments, 90, needs_cuda=False)

    parts = (
        part("timed 1", "bench", ""),
        part("tests 1", "program", "tests 2"),
        part("timed 2", "bench", ""),
        part("tests 2", "program", "tests 1"),
    )
    found, _ = report(tmp_path, *parts, arguments=("--jobs", "2"))
    assert {part["status"] for part in found.values()} == {PASSED}


TESTS = """
import pytest

def test_right(record_property):
    record_property("waits", 0)

def test_wrong():
    assert 1 == 2, "as it should be"

@pytest.mark.skip
def test_left_out():
    pass
"""


def test_what_tests_say_is_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "test_stub.py").write_text(TESTS)
    part = Part("tests", "", "pytest", (str(tmp_path / "test_stub.py"),), 60, needs_cuda=False)
    found, text = report(tmp_path, part, code=1)
    assert found["tests"]["detail"] == "exit code 1 1 passed, 1 failed, 1 skipped"
    [failure] = found["tests"]["failures"]
    assert "test_wrong" in failure
    assert "as it should be" in failure
    assert found["tests"]["figures"] == {"test_right: waits": "0"}
    assert "- test_right: waits: 0" in text


def written(name: str, kind: str, data: Any) -> Part:
    """A stub that writes what a benchmark would."""
    text = f"import sys; open(sys.argv[2], 'w').write({json.dumps(data)!r})"
    return Part(name, "", kind, ("-c", text), 30, needs_cuda=False)


def test_figures_are_tables_in_the_report(tmp_path: Path) -> None:
    task = benchmark.TaskSpec("", "")
    timings = {
        "native": benchmark.Measurement(2, [0.004, 0.008], task),
        "amp_fx": benchmark.Measurement(1, [0.001, 0.002], task),
    }
    comparison = Comparison("two layers", timings, {"amp_fx": 0.004}, {"limit": "no luck"})
    speed = {"comparisons": [{"case": "mlp", **comparison.as_json()}]}
    counted = Totals(3 << 20, 7, 3, 4, 0, 1, 1 << 20)
    names = ("native", "amp_fx", "amp_fx, further", "frozen", "lean", "limit")
    row = command.Row("MLP", "cuda", "bfloat16", "training", dict.fromkeys(names, counted), {}, {})
    seconds = {"native": [2e-6, 4e-6, 9e-6], "amp_fx": [1e-6, 3e-6, 5e-6]}
    rows = [{"case": "gpt2", "kind": "inference", "seconds": seconds}]
    found, text = report(
        tmp_path,
        written("speed", "bench", speed),
        written("bytes", "bytes", command.as_json("bytes", {}, [row])),
        written("blocks", "timed", {"timings": rows}),
    )
    assert {part["status"] for part in found.values()} == {PASSED}
    assert "- gpt2, inference: native 4.0 us (1.000), amp_fx 3.0 us (0.750)" in text
    assert "| `mlp`: two layers | native | 3 ms | 1.00 | - |" in text
    assert "| `mlp`: two layers | amp_fx | 1.5 ms | 0.50 | 4.0e-03 |" in text
    assert "- limit failed: no luck" in text
    assert "| MLP | 3 | 3 | 3 | 3 | 3 | 3 | 7 | 7 | 7 | 7 | 7 | 7 | 1 | 1 | 1 | 1 |" in text


@pytest.mark.slow
def test_tests_that_parts_name_are_there() -> None:
    named = sorted({a for part in PARTS for a in part.arguments if "::" in a})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", *named]
    done = subprocess.run(command, cwd=run.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_part_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = (program("one", ""), program("two", ""))
    found, _ = report(tmp_path, *parts, arguments=("two",))
    assert list(found) == ["two"]
    assert main(["three"], parts) == 2
    assert "no part 'three'; there are 'one', 'two'" in capsys.readouterr().err


def test_the_parts_fit_into_nine_minutes_and_name_what_is_there() -> None:
    tests = max(part.seconds for part in PARTS if not part.is_timed)
    assert tests + sum(part.seconds for part in PARTS if part.is_timed) <= run.BUDGET <= 540
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        assert part.kind in KINDS
        if part.kind == "pytest":
            paths = [run.ROOT / argument.partition("::")[0] for argument in part.arguments]
            assert all(path.exists() for path in paths), part.arguments


@pytest.mark.slow
def test_the_tree_needs_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that finds it by the path alone, the backend has its name."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    with site_folder() as folder:
        given = environment(folder)
        assert "PYTHONPATH" in given
        text = "import torch; print(torch._dynamo.list_backends())"
        done = subprocess.run(
            [sys.executable, "-c", text],
            env={**os.environ, **given},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert (folder / "amp_fx-0.dist-info" / "entry_points.txt").exists()
    assert "'amp_fx'" in done.stdout
