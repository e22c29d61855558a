"""``python -m amp_fx.bench [CASE ...]``: compares amp_fx with other ways to run a model."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.bench import report as reports
from amp_fx.bench.cases import CASES
from amp_fx.bench.contenders import CONTENDERS, NAMES
from amp_fx.bench.settings import Settings, choose, machine, parse_device, versions
from amp_fx.dtypes import LOW_DTYPE_NAMES, low_dtype_named
from amp_fx.errors import AmpFxError, OptionError
from amp_fx.options import COMPILERS, check_device_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
        The exit code: 0 for success, 1 if a case or a contender failed, 2 for an invalid argument.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    parsed = _parser().parse_args(arguments)
    try:
        cases = [choose("case", name, tuple(CASES)) for name in parsed.cases] or list(CASES)
        settings = _parse_settings(parsed)
        if parsed.json:
            _check_folder("--json", parsed.json)
        if parsed.plot:
            _check_folder("--plot", parsed.plot)
            reports.load_pyplot()
    except AmpFxError as error:
        sys.stderr.write(f"amp_fx.bench: {error}\n")
        return 2
    command = shlex.join(["python", "-m", "amp_fx.bench", *arguments])
    report = reports.BenchReport(settings, command, machine(settings.device), versions())
    run(cases, report, reports.make_console(), parsed.json)
    try:
        if parsed.plot:
            reports.write_plot(parsed.plot, report)
    except AmpFxError as error:
        sys.stderr.write(f"amp_fx.bench: {error}\n")
        return 1
    return 1 if report.has_failures else 0


def run(
    cases: Sequence[str],
    report: reports.BenchReport,
    console: Console,
    json_path: Path | None = None,
) -> None:
    """Runs cases; prints each result when it is known and adds it to the report."""
    reports.print_header(console, report)
    with reports.progress(console) as watch:
        for case in cases:
            try:
                for outcome in CASES[case].run(report.settings, watch):
                    report.outcomes.append((case, outcome))
                    reports.print_outcome(console, case, outcome)
            except Exception as error:
                log.debug("%s failed", case, exc_info=True)
                report.failures[case] = f"{type(error).__name__}: {error}"
            if json_path is not None:
                reports.write_json(json_path, report)
    reports.print_footer(console, report)


def _parser() -> argparse.ArgumentParser:
    cases = "\n".join(f"  {name:<16} {case.about}" for name, case in CASES.items())
    contenders = "\n".join(f"  {c.name:<16} {c.about}" for c in CONTENDERS)
    parser = argparse.ArgumentParser(
        prog="python -m amp_fx.bench",
        description="Compares amp_fx with other ways to run a model, in turns in one process.",
        epilog=f"cases:\n{cases}\n\ncontenders:\n{contenders}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Settings()
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--device", default=str(default.device), help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help=", ".join(LOW_DTYPE_NAMES))
    parser.add_argument("--contenders", help="comma-separated; default: all")
    parser.add_argument("--compiler", default=default.compiler, help=", ".join(COMPILERS))
    parser.add_argument(
        "--repeats", default=str(default.repeats), help="rounds; default: %(default)s"
    )
    parser.add_argument("--steps", help="calls in a timed block; default: as many as take 50 ms")
    parser.add_argument("--layers", help="number of layers of the Transformers")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the command")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot to FILE (matplotlib)")
    return parser


def _parse_settings(parsed: argparse.Namespace) -> Settings:
    device = parse_device(parsed.device)
    dtype = low_dtype_named(parsed.dtype)
    check_device_dtype(device.type, dtype)
    contenders = parsed.contenders.split(",") if parsed.contenders else None
    for name in contenders or ():
        choose("--contenders", name, NAMES)
    compiler = choose("--compiler", parsed.compiler, COMPILERS)
    if compiler == "inductor" and device.type == "cpu" and not has_cpp_compiler():
        raise OptionError(
            "inductor requires a C++ compiler for CPU kernels, and found none: install one, or use "
            "--compiler aot_eager"
        )
    return Settings(
        device,
        dtype,
        compiler,
        None if contenders is None else tuple(contenders),
        repeats=_parse_count("--repeats", parsed.repeats),
        steps=_parse_count("--steps", parsed.steps) if parsed.steps else None,
        layers=_parse_count("--layers", parsed.layers) if parsed.layers else None,
        tiny=parsed.tiny,
    )


def _parse_count(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise OptionError(f"{option} {text}: expected a positive integer")
    return int(text)


def _check_folder(option: str, path: Path) -> None:
    """Raises an error if a result cannot be written, before a long run."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise OptionError(f"{option} {path}: expected a file in an existing folder")


if __name__ == "__main__":
    sys.exit(main())
