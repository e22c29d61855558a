"""Writes the results of a run as tables, a JSON file and a bar chart."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils import benchmark

from amp_fx.bench.compare import Comparison, Figure, how_measured
from amp_fx.bench.contenders import LIMIT, LIMIT_FROZEN, NATIVE, NATIVE_FROZEN
from amp_fx.dtypes import dtype_name
from amp_fx.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.utils.benchmark import Measurement

    from amp_fx.bench.compare import Measured, Watch
    from amp_fx.bench.settings import Settings

PIPED_WIDTH = 100


@dataclasses.dataclass
class BenchReport:
    """The results of a run."""

    settings: Settings
    command: str
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    outcomes: list[tuple[str, Comparison | Figure]] = dataclasses.field(default_factory=list)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def comparisons(self) -> list[tuple[str, Comparison]]:
        """Returns the comparisons among the outcomes."""
        return [(case, o) for case, o in self.outcomes if isinstance(o, Comparison)]

    @property
    def figures(self) -> list[tuple[str, Figure]]:
        """Returns the single figures among the outcomes."""
        return [(case, o) for case, o in self.outcomes if isinstance(o, Figure)]

    @property
    def has_failures(self) -> bool:
        """Returns True if a case or a contender failed."""
        return bool(self.failures) or any(c.failures for _, c in self.comparisons)


def make_console() -> Console:
    """Returns a console, which is wide enough for all columns if it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Watch]:
    """Context with a progress bar on a terminal; yields the function that updates it."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def watch(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield watch


def print_header(console: Console, report: BenchReport) -> None:
    """Prints the machine, the versions and the command of a run."""
    for facts in (report.machine, report.versions):
        console.print(", ".join(f"{name} {value}" for name, value in facts.items()), markup=False)
    console.print(report.command, markup=False, soft_wrap=True)


def print_outcome(console: Console, case: str, outcome: Comparison | Figure) -> None:
    """Prints a comparison as a table, or a figure as a line."""
    if isinstance(outcome, Figure):
        value = three_digits(outcome.value)
        line = f"{case}: {outcome.name}: {value} {outcome.unit}{_interval(outcome)}"
        console.print(line, markup=False, soft_wrap=True)
        return
    console.print(comparison_table(case, outcome))
    for name, error in outcome.failures.items():
        console.print(f"{name} failed: {error}", markup=False, soft_wrap=True)
    if outcome.num_recompiled:
        console.print(
            f"{outcome.num_recompiled} graphs were compiled during timing: the times are invalid"
        )


def _interval(figure: Figure) -> str:
    if figure.interval is None:
        return ""
    low, high = map(three_digits, figure.interval)
    return f" ({low} to {high} with 95 % confidence)"


def print_footer(console: Console, report: BenchReport) -> None:
    """Prints the meaning of the columns, and the errors of failed cases."""
    console.print(
        "Speed-up: median of native divided by that of the contender. To frozen, to limit: median "
        "of the contender divided by that of native-freezing, and of limit-freezing (or of limit, "
        "if there is none). Error: norm of the difference from the result of eager float32, "
        "divided by the norm of that result.",
        soft_wrap=True,
    )
    if any(m.peak_bytes is not None for _, c in report.comparisons for m in c.measured):
        description = how_measured(report.settings.device)
        console.print(f"Memory: {description}.", soft_wrap=True)
    for case, error in report.failures.items():
        console.print(f"{case} failed: {error}", markup=False, soft_wrap=True)


def comparison_table(case: str, comparison: Comparison) -> Table:
    """Returns a table with a row for each contender."""
    table = Table(title=f"{case}: {comparison.workload}", title_justify="left")
    table.add_column("contender")
    for column in ("median", "IQR", "speed-up", "to frozen", "to limit", "memory", "error"):
        table.add_column(column, justify="right")
    for measured in comparison.measured:
        inverse = comparison.ratio(NATIVE, measured.name)
        table.add_row(
            measured.name,
            _seconds(measured.timing.median),
            _seconds(measured.timing.iqr),
            _ratio(inverse),
            _ratio(comparison.ratio(measured.name, NATIVE_FROZEN)),
            _ratio(_to_limit(comparison, measured)),
            _bytes(measured.peak_bytes),
            "-" if measured.error is None else f"{measured.error:.1e}",
        )
    return table


def _to_limit(comparison: Comparison, measured: Measured) -> float | None:
    frozen = comparison.ratio(measured.name, LIMIT_FROZEN)
    return comparison.ratio(measured.name, LIMIT) if frozen is None else frozen


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _seconds(seconds: float) -> str:
    """Formats seconds with three digits and a unit."""
    unit, size = benchmark.select_unit(seconds) if seconds else ("s", 1.0)
    return f"{three_digits(seconds / size)} {unit}"


def _bytes(number: int | None) -> str:
    if number is None:
        return "-"
    units = (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")
    size, unit = next((u for u in units if number >= u[0]), units[-1])
    return f"{three_digits(number / size)} {unit}"


def three_digits(value: float) -> str:
    """Formats a number with at least three digits and without an exponent."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def write_json(path: Path, report: BenchReport) -> None:
    """Writes all samples and the contents of the tables."""
    path.write_text(json.dumps(as_json(report), indent=1) + "\n")


def as_json(report: BenchReport) -> dict[str, Any]:
    """Converts a report to JSON-serializable values; times are in seconds, memory in bytes."""
    settings = dataclasses.asdict(report.settings)
    settings["device"] = str(report.settings.device)
    settings["dtype"] = dtype_name(report.settings.dtype)
    return {
        "command": report.command,
        "machine": report.machine,
        "versions": report.versions,
        "settings": settings,
        "memory": how_measured(report.settings.device),
        "comparisons": [_comparison_as_json(case, c) for case, c in report.comparisons],
        "figures": [{"case": case, **dataclasses.asdict(f)} for case, f in report.figures],
        "failures": report.failures,
    }


def _comparison_as_json(case: str, comparison: Comparison) -> dict[str, Any]:
    return {
        "case": case,
        "workload": comparison.workload,
        "contenders": [_measured_as_json(comparison, m) for m in comparison.measured],
        "failures": comparison.failures,
        "recompiled_graphs": comparison.num_recompiled,
    }


def _measured_as_json(comparison: Comparison, measured: Measured) -> dict[str, Any]:
    timing = measured.timing
    return {
        "name": measured.name,
        "median": timing.median,
        "iqr": timing.iqr,
        "quartiles": _quartiles(timing),
        "seconds": timing.times,
        "steps": timing.number_per_run,
        "speedup_over_native": comparison.ratio(NATIVE, measured.name),
        "time_to_native_freezing": comparison.ratio(measured.name, NATIVE_FROZEN),
        "time_to_limit": _to_limit(comparison, measured),
        "peak_bytes": measured.peak_bytes,
        "first_call": measured.first_call,
        "graphs": measured.num_graphs,
        "error": measured.error,
    }


def _quartiles(timing: Measurement) -> list[float]:
    times = torch.tensor(timing.times, dtype=torch.float64)
    return [float(times.quantile(share)) for share in (0.25, 0.75)]


def load_pyplot() -> Any:
    """Returns matplotlib's ``pyplot``, set to draw to files."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise OptionError("--plot requires matplotlib: pip install 'amp_fx[bench]'") from None


def write_plot(path: Path, report: BenchReport) -> None:
    """Draws a bar for each contender of each comparison, with quartiles."""
    pyplot = load_pyplot()
    comparisons, num = report.comparisons, len(report.comparisons)
    if not comparisons:
        return
    size = (8, 2.2 * num)
    figure, axes = pyplot.subplots(num, 1, figsize=size, squeeze=False, layout="constrained")
    for ax, (case, comparison) in zip(axes[:, 0], comparisons, strict=True):
        _draw_bars(ax, case, comparison)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"--plot {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _draw_bars(ax: Any, case: str, comparison: Comparison) -> None:
    names = [measured.name for measured in comparison.measured]
    timings = [measured.timing for measured in comparison.measured]
    below = [1e3 * (t.median - _quartiles(t)[0]) for t in timings]
    above = [1e3 * (_quartiles(t)[1] - t.median) for t in timings]
    ax.barh(names, [1e3 * t.median for t in timings], xerr=[below, above])
    ax.invert_yaxis()
    ax.set_title(f"{case}: {comparison.workload}", loc="left", fontsize="medium")
    ax.set_xlabel("ms, median and quartiles")
