"""Runs the examples of README.md and the documentation, and checks the site."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import amp_fx
from amp_fx import errors
from amp_fx.commands.parsers import ADD
from amp_fx.options import Options
from amp_fx.policies.policy import preset_names
from amp_fx.weights.write_signals import CAUGHT_BY, DEVICES
from tests.snippets import PAGES, ROOT, fenced

if TYPE_CHECKING:
    from collections.abc import Callable

HAS_DOT = shutil.which("dot") is not None
CACHING = ROOT / "docs" / "guide" / "caching.md"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run(folder: Path, *arguments: str) -> str:
    """Returns the output of Python in a terminal of 100 columns."""
    paths = [str(ROOT), str(ROOT / "docs/examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def missing_libraries(text: str) -> list[str]:
    """Training libraries that a text imports and that are not here."""
    names = ("accelerate", "lightning", "onnxruntime", "onnxscript", "transformers")
    return [n for n in names if f"import {n}" in text and importlib.util.find_spec(n) is None]


def run_pages(folder: Path, pages: list[Path], *options: str) -> None:
    """Runs all snippets of pages in one process, as importing torch takes longer than most."""
    files: dict[Path, list[Path]] = {}
    for page in pages:
        for index, text in enumerate(fenced(page, "python")):
            if missing_libraries(text) or ("amp_fx.draw(" in text and not HAS_DOT):
                continue
            name = f"{name_of(page).replace(os.sep, '_')}_{index}.py"
            files.setdefault(page, []).append(folder / name)
            files[page][-1].write_text(text, encoding="utf-8")
    every = [str(file) for found in files.values() for file in found]
    printed = run(folder, str(ROOT / "tests" / "snippets.py"), *options, *every)
    outputs = [(name_of(page), text) for page in files for text in fenced(page, "text")]
    assert [output for output in outputs if output[1] not in printed] == []


WITH_INDUCTOR = [ROOT / "README.md", ROOT / "docs" / "guide" / "numerics.md"]


@pytest.mark.slow
def test_each_snippet_that_is_about_inductor_runs_alone(tmp_path: Path) -> None:
    run_pages(tmp_path, WITH_INDUCTOR, "--inductor")


ON_A_DEVICE = [ROOT / "docs" / "guide" / "accelerators.md"]
"""A process can have one out-of-tree device, which other pages must not see."""


@pytest.mark.slow
def test_snippets_about_a_new_device_run(tmp_path: Path) -> None:
    run_pages(tmp_path, ON_A_DEVICE)


@pytest.mark.slow
def test_each_snippet_of_the_documentation_runs_alone_and_prints_what_is_shown(
    tmp_path: Path,
) -> None:
    """Runs snippets through AOTAutograd, because inductor takes longer."""
    pages = [page for page in PAGES if page not in (*WITH_INDUCTOR, *ON_A_DEVICE)]
    assert sum(len(fenced(page, "python")) for page in pages) > 15
    run_pages(tmp_path, pages)


@pytest.mark.slow
def test_commands_run(tmp_path: Path) -> None:
    """Runs all in one process, because each would spend most of its time importing torch."""
    shown = "".join(text for page in PAGES for text in fenced(page, "sh")).replace("\\\n", "")
    programs: list[str] = []
    for command in sorted({*shown.splitlines()}):
        python, option, module, *arguments = shlex.split(command, comments=True)
        assert (python, option, module) == ("python", "-m", "amp_fx")
        if HAS_DOT or "--html" not in arguments:
            programs += ["--program", str(ROOT / "amp_fx" / "__main__.py"), *arguments]
    assert programs
    assert run(tmp_path, str(ROOT / "tests" / "snippets.py"), "--inductor", *programs)
    for path in (word for word in programs if word.endswith(".html")):
        assert (tmp_path / path).exists()


LINKS = [
    pytest.param(page, link, id=f"{name_of(page)}: {link}")
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
    for link in re.findall(r"\]\(([^)#:]+)[^)]*\)", page.read_text(encoding="utf-8"))
    if not link.startswith("http")
]


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_links_lead_somewhere(page: Path, link: str) -> None:
    assert (page.parent / link).exists()


def test_the_readme_is_one_screen_and_the_rest_is_linked() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    first_screen = "\n".join(text.splitlines()[:40])
    for part in ("```python", "| GPT-2 small, one token", "docs/assets/attention.svg"):
        assert part in first_screen
    assert "docs/assets/attention.svg" in text


def test_the_times_of_the_readme_are_those_of_the_benchmarks() -> None:
    """Both come from one run; the home page includes the README's table."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    measured: dict[str, set[str]] = {}
    for line in (
        page.split("### AVX512 with bfloat16 units", 1)[1].split("\n### ", 1)[0].splitlines()
    ):
        name, *cells = line.strip("| ").replace("*", "").split(" | ")
        measured.setdefault(name, set()).update(cells)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("[start:times]", 1)[1].split("[end:times]", 1)[0]
    rows = [line.strip("| ") for line in table.splitlines() if line.startswith("|")][2:]
    assert rows
    for row in rows:
        name, *times, errors = row.replace("*", "").split(" | ")
        assert {*times, *errors.split(", ")} <= measured[name], row
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert '--8<-- "README.md:times"' in index
    assert " ms |" not in index
    data = json.loads((ROOT / "docs" / "assets" / "benchmarks.json").read_text(encoding="utf-8"))
    for row in data["comparisons"]:  # of which the plots are drawn
        numbers = {
            float(cell)
            for cell in measured[row["workload"]]
            if cell[:1].isdigit() and "(" not in cell
        }
        drawn = [1e3 * statistics.median(each) for each in row["seconds"].values()]
        drawn += [1e3 * error for error in row["errors"].values()]
        assert len(drawn) > 8
        assert {float(f"{number:.3g}") for number in drawn} <= numbers, row["workload"]


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Functions and classes", set(amp_fx.__all__) - {"__version__"}),
        ("Options", {field.name for field in dataclasses.fields(Options)}),
        ("Cast policies", {policy.value for policy in amp_fx.CastPolicy}),
        ("Presets", set(preset_names())),
        ("Commands", set(ADD)),
    ],
)
def test_the_reference_lists_every_name(heading: str, names: set[str]) -> None:
    page = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    section = page.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith(("| `", "| [`"))]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert listed - {"integrations", "errors", "options"} == names


def test_names_that_pages_use_need_no_other_import() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    text = re.sub(r"(?m)^:::.*$", "", text)  # the site imports what it documents
    names = set(re.findall(r"\bamp_fx\.([A-Za-z]\w*)", text))
    assert len(names) > 30
    imported = {"passes", "policies", "pytest"}
    imported |= {"reason", "region"}  # keys of the metadata of ONNX files
    assert names - imported <= {*amp_fx.__all__, *amp_fx._SUBMODULES}


def test_the_table_of_signals_is_that_of_the_code() -> None:
    text = CACHING.read_text(encoding="utf-8")
    table = text.split("| a write by |", 1)[1]
    lines = [line.strip("| ").split(" | ") for line in table.split("\n\n", 1)[0].splitlines()]
    shown = {kind: dict(zip(DEVICES, cells, strict=True)) for kind, *cells in lines[2:]}
    assert shown == {
        kind: {device: ", ".join(signals) or "none" for device, signals in caught.items()}
        for kind, caught in CAUGHT_BY.items()
    }


def test_the_table_of_causes_is_true() -> None:
    """Its first column holds what is run; versions and pointers are those of a new weight."""
    table = CACHING.read_text(encoding="utf-8").split("| write | `_version`", 1)[1]
    lines = [line.strip("| ").split(" | ") for line in table.split("\n\n", 1)[0].splitlines()]
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for code, *shown in lines[2:]:
            weight = torch.nn.Parameter(torch.ones(2, 2))
            weight.grad = torch.ones(2, 2)
            kept = amp_fx.keep(lambda w: w * 2, weight)
            kept()
            before = weight._version, weight.data_ptr()
            kept()
            assert kept.is_fresh()
            with torch.no_grad():
                exec(code.strip("`"), {"torch": torch, "weight": weight})
            is_stale = not kept.is_fresh()
            after = weight._version, weight.data_ptr()
            found = [*(a != b for a, b in zip(before, after, strict=True)), is_stale]
            assert ["yes" if each else "no" for each in found] == shown, code
            assert torch.equal(kept(), weight.detach() * 2)
    finally:
        torch.distributed.destroy_process_group()


EXAMPLES = {
    "demo": ["--steps=10"],
    "train_distributed": ["--steps=3", "--width=16"],
    "finetune_trainer": ["--steps=3", "--length=8"],
    "serve_kv_cache": ["--width=16", "--layers=2", "--tokens=4"],
    "float16_scaler": ["--steps=4", "--width=8"],
    "keep_float8": ["--width=16", "--updates=2", "--calls=2"],
}


def test_troubleshooting_names_each_class_of_error() -> None:
    text = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    classes = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert [name for name in classes if not re.search(rf"`(\w+\.)*{name}`", text)] == []


def saying(call: Callable[[], Any]) -> str:
    """Returns the message of what a call raises; some errors of the scaler are torch's."""
    with pytest.raises((errors.AmpFxError, AssertionError, RuntimeError)) as raised:
        call()
    return str(raised.value)


def test_troubleshooting_finds_a_message_by_its_words() -> None:
    """Looks up messages that users see first; a row quotes a message, with ... for what varies."""
    text = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line[:2] == "| "]
    quoted = [part.strip() for row in rows for part in row.split(";")]
    patterns = [".*".join(map(re.escape, part.replace("`", "").split("..."))) for part in quoted]
    linear = torch.nn.Linear(4, 4)
    sgd = torch.optim.SGD(linear.parameters(), lr=0.1)
    low = torch.nn.Linear(4, 4).half()
    scaler = amp_fx.GradScaler("cpu")
    scaler.scale(low(torch.ones(2, 4).half()).sum()).backward()
    met = [
        saying(lambda: amp_fx.compile(linear, backend="inductor")),
        saying(lambda: amp_fx.compile(linear, options={"output_dtype": "original"})),
        saying(lambda: amp_fx.compile(linear, options={"polcy": "torch"})),
        saying(lambda: amp_fx.preset("torch").with_ops({"sofmax": "fp32"})),
        saying(lambda: amp_fx.explain(torch.nn.LSTM(4, 4))(torch.ones(3, 2, 4))),
        saying(lambda: amp_fx.accuracy(linear.bfloat16())(torch.ones(2, 4))),
        saying(lambda: amp_fx.store_low(torch.nn.Linear(4, 4))(torch.ones(2, 4))),
        saying(lambda: amp_fx.GradScaler("cpu").unscale_(sgd)),
        saying(lambda: amp_fx.GradScaler("cpu").load_state_dict({})),
        saying(lambda: scaler.unscale_(torch.optim.SGD(low.parameters(), lr=0.1))),
    ]
    assert [said for said in met if not any(re.search(p, said) for p in patterns if p)] == []


@pytest.mark.slow
def test_examples_hold_what_they_assert(tmp_path: Path) -> None:
    programs = []
    for name, arguments in EXAMPLES.items():
        path = ROOT / "docs" / "examples" / f"{name}.py"
        if not missing_libraries(path.read_text(encoding="utf-8")):
            programs += ["--program", str(path), *arguments]
    assert "float16_scaler.py" in "".join(programs)
    assert run(tmp_path, str(ROOT / "tests" / "snippets.py"), *programs)


def test_there_is_a_run_of_each_example() -> None:
    assert {path.stem for path in (ROOT / "docs" / "examples").glob("*.py")} == {*EXAMPLES}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "material", "mkdocstrings", "mkdocs_jupyter"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: pip install .[docs]")
    folder = tmp_path_factory.mktemp("docs") / "site"
    run(ROOT, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    return folder


@pytest.mark.slow
def test_the_site_has_its_pages_and_all_public_names(site: Path) -> None:
    pages = {path.relative_to(site) for path in site.rglob("index.html")}
    assert {Path(name, "index.html") for name in ("changelog", "contributing", "security")} <= pages
    assert Path("notebooks/01_quickstart/index.html") in pages
    reference = "".join(
        path.read_text(encoding="utf-8") for path in (site / "reference").glob("*/index.html")
    )
    headings = set(re.findall(r'<h\d id="amp_fx\.(\w+)" class="doc doc-heading">', reference))
    missing = [name for name in amp_fx.__all__ if name[0] != "_" and name not in headings]
    assert missing == []
    assert re.findall(r'id="amp_fx\.[\w.]*\._\w*"', reference) == []
    texts = {path: (site / path).read_text(encoding="utf-8") for path in pages}
    assert [path for path, text in texts.items() if re.search(r"--8\s*&lt;|::</p>", text)] == []
    examples = (site / "examples" / "index.html").read_text(encoding="utf-8")
    assert "argparse" in examples  # the programs themselves, not the lines that include them


@pytest.mark.slow
def test_the_page_of_options_shows_the_options_alone(site: Path) -> None:
    text = (site / "reference" / "compile" / "index.html").read_text(encoding="utf-8")
    shown = re.findall(r'<h\d id="amp_fx\.options\.Options\.(\w+)"', text)
    assert shown == [field.name for field in dataclasses.fields(Options)]
    assert "factory" not in text


@pytest.mark.slow
def test_pictures_have_a_text(site: Path) -> None:
    texts = [
        text
        for path in site.rglob("index.html")
        for text in re.findall(r"<img (?:alt=\"([^\"]*)\")?", path.read_text(encoding="utf-8"))
    ]
    assert len(texts) > 15
    assert [text for text in texts if len(text) < 10 or "No description" in text] == []


@pytest.mark.skipif(not HAS_DOT, reason="needs the dot program")
def test_the_picture_of_the_readme_shows_casts() -> None:
    text = (ROOT / "docs" / "assets" / "attention.svg").read_text(encoding="utf-8")
    assert "cast, in every call" in text
    assert "cast of a weight, once per write" in text
