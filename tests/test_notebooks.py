"""The notebooks run, show what is committed, and tell nothing of the machine that ran them."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "notebooks/run.py"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

TOOLS = ("nbclient", "nbformat", "ipykernel", "matplotlib")
MISSING = [name for name in TOOLS if importlib.util.find_spec(name) is None]
if shutil.which("dot") is None:
    MISSING.append("the dot program")
can_run = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])

# A path from the root of a disk; not what stands in tags and addresses of the web.
ABSOLUTE = re.compile(r"""(?:^|[\s"'(=])(?:(?:/[\w.~-]+){2,}|[A-Za-z]:\\\\?\w)""", re.MULTILINE)


def run(*arguments: str, script: Path = RUN) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def shown_text(path: Path) -> Iterator[str]:
    """All texts that a notebook's cells show, pictures in SVG included."""
    for cell in code_cells(path):
        for output in cell["outputs"]:
            data = output.get("data", {})
            texts = [output.get("text", []), *(v for k, v in data.items() if k != "image/png")]
            yield from ("".join(text) for text in texts)


def test_there_are_notebooks() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == [f"0{n}_" for n in range(1, 8)]


@pytest.mark.slow
@can_run
@each
def test_it_runs_and_shows_what_is_committed(path: Path) -> None:
    done = run("--check", path.stem)
    assert done.returncode == 0, done.stdout + done.stderr


@each
def test_it_was_committed_after_a_run(path: Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds <= {"stream", "display_data", "execute_result"}
    streams = {output.get("name") for cell in cells for output in cell["outputs"]}
    assert "stderr" not in streams
    shown = {
        kind for cell in cells for output in cell["outputs"] for kind in output.get("data", ())
    }
    assert shown & {"image/png", "image/svg+xml"}


@each
def test_it_tells_nothing_of_the_machine(path: Path) -> None:
    found = [match[0] for text in shown_text(path) for match in ABSOLUTE.finditer(text)]
    assert not found
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert not any(cell["metadata"] for cell in notebook["cells"])


@each
def test_its_links_lead_somewhere(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / link).exists(), link


def write(folder: Path, name: str, *sources: str) -> Path:
    """Writes a notebook next to a copy of the script, which runs the notebooks in its folder."""
    shutil.copy(RUN, folder / "run.py")
    cells: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "id": f"cell-{number}",
            "metadata": {"collapsed": True},
            "execution_count": None,
            "outputs": [],
            "source": source,
        }
        for number, source in enumerate(sources)
    ]
    path = folder / f"{name}.ipynb"
    notebook = {"cells": cells, "metadata": {"mine": 1}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


@pytest.mark.slow
@can_run
def test_a_check_finds_what_was_changed_and_writes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "changed", "print(1)", "2")
    run(script=tmp_path / "run.py")
    written = path.read_text(encoding="utf-8")

    notebook = json.loads(written)
    notebook["cells"][0]["outputs"] = []
    path.write_text(json.dumps(notebook), encoding="utf-8")
    done = run("--check", script=tmp_path / "run.py")
    assert done.returncode == 1
    assert "code cell 1 shows ('stdout',), but () is written" in done.stdout
    assert json.loads(path.read_text(encoding="utf-8")) == notebook

    path.write_text(written.replace("print(1)", "print(3)"), encoding="utf-8")
    done = run("--check", script=tmp_path / "run.py")
    assert done.returncode == 1
    assert "code was changed after its outputs were written" in done.stdout
    assert "make notebooks ARGS=changed" in done.stdout
