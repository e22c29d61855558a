"""``make gpu``: all that wants a GPU, in one command and within nine minutes.

``python -m tests.gpu.run [PART ...]``, from the top of the tree, with the machine's own torch:
nothing is installed or fetched. Prints as it goes, goes on after a part that fails, and writes
``gpu-report.md`` and ``gpu-report.json``. Without a GPU it runs the parts that need none.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.gpu import reporting
from tests.gpu.parts import PARTS
from tests.gpu.runner import FAILED, TIMED_OUT, run_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.gpu.parts import Part
    from tests.gpu.runner import Outcome

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 530.0
"""Seconds for all parts; nine minutes with what goes on around them."""
MOST_JOBS = 9
"""As many parts of tests as run at the same time on a machine with 18 cores or more."""


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Runs the parts.

    Args:
        argv: The arguments; those of the process if None.
        parts: What there is to run.

    Returns:
        The exit code: 0; 1 if a part failed or was ended; 2 for an argument that is not usable.
    """
    parsed = _parser(parts).parse_args(argv)
    unknown = set(parsed.parts) - {part.name for part in parts}
    if unknown or not parsed.out.absolute().parent.is_dir():
        wrong = f"no part {min(unknown)!r}" if unknown else f"--out {parsed.out}: no such folder"
        sys.stderr.write(f"tests.gpu.run: {wrong}; there are {_names(parts)}\n")
        return 2
    chosen = [part for part in parts if not parsed.parts or part.name in parsed.parts]
    has_cuda = torch.cuda.is_available()
    about = facts(has_cuda=has_cuda)
    for name, value in about.items():
        _tell(f"{name}: {value}")
    start = time.monotonic()

    def finished(outcomes: list[Outcome]) -> None:
        about["seconds"] = f"{time.monotonic() - start:.0f}"
        reporting.write(parsed.out, about, outcomes)

    with site_folder() as folder:
        outcomes = run_parts(
            chosen,
            has_cuda=has_cuda,
            budget=parsed.budget,
            jobs=parsed.jobs,
            environment=environment(folder),
            told=_tell,
            finished=finished,
        )
    _tell(f"wrote {parsed.out.with_suffix('.md')} and {parsed.out.with_suffix('.json')}")
    return int(any(outcome.status in (FAILED, TIMED_OUT) for outcome in outcomes))


def _parser(parts: Sequence[Part]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {_names(parts)}")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="without an ending")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all parts")
    jobs = max(1, min(MOST_JOBS, (os.cpu_count() or 1) // 2))
    parser.add_argument("--jobs", type=int, default=jobs, help="parts of tests at the same time")
    return parser


def _names(parts: Sequence[Part]) -> str:
    return ", ".join(repr(part.name) for part in parts)


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def facts(*, has_cuda: bool) -> dict[str, str]:
    """The machine and the versions."""
    found = {"torch": torch.__version__, "python": platform.python_version()}
    found["devices"] = "none: only parts that need no CUDA are run"
    if has_cuda:
        names = []
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            names.append(f"{torch.cuda.get_device_name(index)} ({major}.{minor})")
        found["devices"] = ", ".join(names)
    found["cores"] = str(os.cpu_count())
    return found


def environment(folder: Path) -> dict[str, str]:
    """Of the processes: they find this tree, and what stands in for what is not installed."""
    path = [str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
    }


@contextlib.contextmanager
def site_folder() -> Iterator[Path]:
    """A folder that makes the tree look installed, and has what torch's test lists import."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="amp_fx"):
            info = folder / "amp_fx-0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: amp_fx\nVersion: 0\n")
            (info / "entry_points.txt").write_text(
                "[torch_dynamo_backends]\namp_fx = amp_fx.backend:amp_fx\n"
            )
        if importlib.util.find_spec("expecttest") is None:
            (folder / "expecttest.py").write_text("from unittest import TestCase  # noqa: F401\n")
        yield folder


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
