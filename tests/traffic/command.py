"""``python -m tests.traffic bytes``: counts all models and prints native, amp_fx and the limit."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.dtypes import dtype_name
from amp_fx.errors import AmpFxError, OptionError
from amp_fx.options import as_low_dtype
from tests.traffic.facts import three_digits, versions
from tests.traffic.models import CASES, TINY
from tests.traffic.pretend import PROPERTIES, can_pretend
from tests.traffic.totals import totals
from tests.traffic.worker import AMP_FX, CONTENDERS, FROZEN, LEAN, LIMIT, MARK, NATIVE, POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.traffic.totals import Totals

DEVICES = ("cpu", "cuda")
MODES = ("training", "inference")
COLUMNS = ("native", "amp_fx", "amp_fx, further", "frozen", "lean", "limit")


@dataclasses.dataclass(frozen=True)
class Row:
    """One model in one dtype, trained or not.

    Attributes:
        about: The model.
        device: Whose code was generated.
        dtype: The low dtype's name.
        mode: ``"training"`` or ``"inference"``.
        totals: By column: native; amp_fx in the first call after an update, casts of weights
            included; amp_fx in further calls; in inference with frozen weights, in further calls
            (and under ``"frozen, first"`` in the first); the preset ``lean`` in the first call;
            the limit.
        failures: Why a contender has no figures.
        cubin_failures: Kernels of amp_fx that do not compile, by compute capability.
    """

    about: str
    device: str
    dtype: str
    mode: str
    totals: dict[str, Totals]
    failures: dict[str, str]
    cubin_failures: dict[str, dict[str, str]]


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: The arguments behind ``bytes``.

    Returns:
        The exit code: 0; 1 if something has no figures; 2 for an argument that is not usable.
    """
    parsed = _parser().parse_args(list(argv))
    console = Console()
    rows: list[Row] = []
    try:
        jobs = _jobs(parsed)
        command = shlex.join(["python", "-m", "tests.traffic", "bytes", *argv])
        facts = {**versions(), "code for": _target(jobs[0][0]["device"])}
        console.print(", ".join(f"{k} {v}" for k, v in facts.items()), markup=False)
        for row in _rows(jobs):
            rows.append(row)
            _print_row(console, row)
            if parsed.json:
                parsed.json.write_text(json.dumps(as_json(command, facts, rows), indent=1) + "\n")
    except AmpFxError as error:
        sys.stderr.write(f"tests.traffic: {error}\n")
        return 2
    console.print(f"\n{markdown(rows)}", markup=False, highlight=False, soft_wrap=True)
    if parsed.markdown:
        parsed.markdown.write_text(markdown(rows))
    return 1 if any(row.failures or any(row.cubin_failures.values()) for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    cases = "\n".join(f"  {name:<8} {case.about}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.traffic bytes",
        description="Counts what the generated kernels of whole models read and write. Nothing "
        "runs: neither a GPU nor the models' memory is needed.",
        epilog=f"cases:\n{cases}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument(
        "--device", choices=DEVICES, help="default: cuda where this torch generates code for it"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", help="one or more, comma-separated; default: %(default)s"
    )
    parser.add_argument("--mode", choices=MODES, help="default: both")
    parser.add_argument(
        "--cubin", metavar="SM", help="compile amp_fx's kernels for these too, such as 80,90"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models: a trial, no figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    return parser


def _jobs(parsed: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The jobs of each row, all contenders, in order."""
    device = parsed.device or ("cuda" if can_pretend() else "cpu")
    if device == "cuda" and not can_pretend():
        raise OptionError("--device cuda: this torch was built without CUDA or Triton; try cpu")
    if not has_cpp_compiler():
        raise OptionError("inductor finds no C++ compiler")
    unknown = [name for name in parsed.cases if name not in CASES]
    if unknown:
        raise OptionError(f"case {unknown[0]}: not one of {', '.join(CASES)}")
    for path in (parsed.json, parsed.markdown):
        if path and not path.absolute().parent.is_dir():
            raise OptionError(f"{path}: not a file in a folder that exists")
    capabilities = _capabilities(parsed.cubin, device)
    dtypes = [dtype_name(as_low_dtype(name)) for name in parsed.dtype.split(",")]
    return [
        [
            {
                "case": case,
                "contender": contender,
                "device": device,
                "dtype": dtype,
                "trains": mode == "training",
                "tiny": parsed.tiny,
                "capabilities": capabilities if contender in POLICIES else [],
            }
            for contender in _contenders(device, mode)
        ]
        for case in parsed.cases or CASES
        for dtype in dtypes
        for mode in ([parsed.mode] if parsed.mode else MODES)
    ]


def _contenders(device: str, mode: str) -> Sequence[str]:
    """Who is counted: what freezing packs on the CPU is opaque, and cannot be fake."""
    return CONTENDERS if device == "cpu" or mode == MODES[0] else (*CONTENDERS, FROZEN)


def _capabilities(text: str | None, device: str) -> list[int]:
    if not text:
        return []
    names = text.replace("sm_", "").split(",")
    if device != "cuda" or not all(name.isdecimal() for name in names):
        raise OptionError(f"--cubin {text}: give compute capabilities like 80,90, for cuda")
    return [int(name) for name in names]


def _target(device: str) -> str:
    return str(PROPERTIES.name) if device == "cuda" else "the CPU backend"


def _rows(jobs: Sequence[Sequence[dict[str, Any]]]) -> Iterator[Row]:
    """Runs the jobs, one process for all rows of a case, and gives rows as they are finished."""
    cases = dict.fromkeys(row[0]["case"] for row in jobs)
    for case in cases:
        own = [row for row in jobs if row[0]["case"] == case]
        answers = _answers([job for row in own for job in row])
        for row in own:
            yield _row([next(answers, _ENDED) for _ in row], row)


_ENDED: Mapping[str, Any] = {"error": "its process ended"}


def _answers(jobs: Sequence[dict[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """What the worker prints, job by job; where it dies, the rest is missing."""
    command = [sys.executable, "-m", "tests.traffic.worker", json.dumps(jobs)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    # In a file: a pipe that nobody reads while the other one is read would fill and stop it.
    with tempfile.TemporaryFile("w+") as errors_file:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors_file, env=environment, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    yield json.loads(line.removeprefix(MARK))
        errors_file.seek(0)
        errors = errors_file.read().strip().splitlines()
    if process.returncode:
        yield {"error": errors[-1] if errors else f"its process ended with {process.returncode}"}


def _row(answers: Sequence[Mapping[str, Any]], jobs: Sequence[dict[str, Any]]) -> Row:
    first = jobs[0]
    found: dict[str, Totals] = {}
    failures: dict[str, str] = {}
    cubins: dict[str, dict[str, str]] = {}
    for job, answer in zip(jobs, answers, strict=True):
        name, device = job["contender"], job["device"]
        if "error" in answer:
            failures[name] = answer["error"]
            continue
        found[name] = totals(answer["first"], answer["refreshed"], device)
        if name == AMP_FX:
            found["amp_fx, further"] = totals(answer["further"], [], device)
        if name == FROZEN:
            found["frozen, first"] = found[name]
            found[name] = totals(answer["further"], [], device)
        for capability, failed in answer["cubin_failures"].items():
            cubins.setdefault(capability, {}).update(failed)
    mode = MODES[0] if first["trains"] else MODES[1]
    about = (TINY if first["tiny"] else CASES)[first["case"]].about
    return Row(about, first["device"], first["dtype"], mode, found, failures, cubins)


def _print_row(console: Console, row: Row) -> None:
    what = f"{row.about}, {row.dtype}, {row.mode}: "
    shares = [f"{n} {_mib(row.totals[n].num_bytes)}" for n in COLUMNS if n in row.totals]
    console.print(f"{what}{', '.join(shares)} MiB", markup=False, highlight=False, soft_wrap=True)
    for name, why in row.failures.items():
        console.print(f"{what}{name} failed: {why}", markup=False)
    for capability, failed in row.cubin_failures.items():
        told = "; ".join(f"{kernel}: {why}" for kernel, why in failed.items()) or "all compile"
        console.print(f"{what}kernels for sm_{capability}: {told}", markup=False, highlight=False)


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Rows that make one table, and its title."""
    for dtype, mode in dict.fromkeys((row.dtype, row.mode) for row in rows):
        group = [row for row in rows if (row.dtype, row.mode) == (dtype, mode)]
        yield f"{mode}, {dtype}, {_target(group[0].device)}", group


def _mib(num_bytes: int) -> str:
    return three_digits(num_bytes / 2**20)


HEADER = (
    "model",
    "MiB: native",
    "amp_fx",
    "further",
    "frozen",
    "lean",
    "limit",
    "kernels: native",
    "amp_fx",
    "further",
    "frozen",
    "lean",
    "limit",
    "saved MiB: native",
    "amp_fx",
    "lean",
    "limit",
)
WIRE = ("sent MiB: native", "amp_fx", "lean", "limit")
"""More columns, where programs of several ranks are among the models."""


def cells(row: Row, *, sends: bool = False) -> list[str]:
    """A row as ``HEADER`` and, if ``sends``, ``WIRE`` name it; ``-`` for what has no figures."""

    def shown(name: str, field: str) -> str:
        if name not in row.totals:
            return "-"
        value = getattr(row.totals[name], field)
        return str(value) if field == "num_launches" else _mib(value)

    saved = [shown(name, "saved_bytes") for name in (NATIVE, AMP_FX, LEAN, LIMIT)]
    sent = [shown(name, "wire_bytes") for name in (NATIVE, AMP_FX, LEAN, LIMIT)]
    return [
        row.about,
        *(shown(name, "num_bytes") for name in COLUMNS),
        *(shown(name, "num_launches") for name in COLUMNS),
        *(saved if row.mode == MODES[0] else [""] * len(saved)),
        *((sent if _sends(row) else [""] * len(sent)) if sends else []),
    ]


def _sends(row: Row) -> bool:
    return any(found.wire_bytes for found in row.totals.values())


def markdown(rows: Sequence[Row]) -> str:
    """All tables, as Markdown."""
    parts = []
    for title, group in _groups(rows):
        sends = any(map(_sends, group))
        header = (*HEADER, *(WIRE if sends else ()))
        marks = ["---", *["---:"] * (len(header) - 1)]
        lines = [header, marks, *(cells(row, sends=sends) for row in group)]
        parts += [title, "", *("| " + " | ".join(line) + " |" for line in lines), ""]
    return "\n".join(parts)


def as_json(command: str, facts: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """All figures as JSON takes them; sizes in bytes."""
    return {"command": command, **facts, "rows": [dataclasses.asdict(row) for row in rows]}
