"""A report as a table for the terminal, through rich."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from amp_fx.explanation.rows import folded_path, without_numbers
from amp_fx.numerics.words import number, share
from amp_fx.reports import dtype_cell, human, new_table, times

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType
    from rich.table import Table

    from amp_fx.numerics.records import OpRecord
    from amp_fx.numerics.report import AccuracyReport

MOST = 12
"""Rows of the table, and lines of suspects."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Ops of one name in like modules.

    Attributes:
        nodes: Their records.
    """

    nodes: tuple[OpRecord, ...]

    @property
    def effect(self) -> float:
        """What they do to the loss together, to first order."""
        return sum(n.effect or 0.0 for n in self.nodes)

    @property
    def effect_rms(self) -> float:
        """The same with signs by chance."""
        return math.hypot(*(n.effect_rms for n in self.nodes))

    @property
    def overflows(self) -> int:
        """Elements that overflow."""
        return sum(n.overflows + n.singular for n in self.nodes)


def rows_of(nodes: Iterable[OpRecord]) -> list[Row]:
    """Alike ops together, those first that overflow, then those that move the loss most."""
    groups: dict[tuple[str, str, str], list[OpRecord]] = {}
    for node in nodes:
        key = (node.stage, without_numbers(node.module), node.label)
        groups.setdefault(key, []).append(node)
    rows = [Row(tuple(group)) for group in groups.values()]
    return sorted(rows, key=lambda row: (row.overflows == 0, -row.effect_rms))


def render(report: AccuracyReport) -> RenderableType:
    """The table as something that rich prints."""
    parts: list[RenderableType] = [_head(report)]
    problem = report.reference_problem
    if problem is not None:
        where = f" in {problem.module}" if problem.module else ""
        parts.append(
            Text(f"{report.reference} itself becomes infinite or NaN: first {problem.label}{where}")
        )
    for place, suspect in enumerate(report.suspects[:MOST], 1):
        parts.append(Text(f"{place}. {suspect}", style="bold" if place == 1 else ""))
    if not report.suspects and problem is None:
        parts.append(Text("no suspects"))
    if len(report.suspects) > MOST:
        parts.append(Text(f"... and {len(report.suspects) - MOST} more"))
    rows = rows_of(report.nodes)
    parts += [Text(""), _table(report, rows[:MOST])]
    notes = _notes(report, len(rows))
    return Group(*parts, *([Text(""), *notes] if notes else []))


def _head(report: AccuracyReport) -> Text:
    text = Text.assemble(
        (report.model, "bold"),
        f" on {report.device_type} {report.dtype}, against {report.reference}: ",
    )
    if report.loss is not None:
        text.append(f"loss {report.loss:.6g} ({report.reference_loss:.6g})")
    else:
        text.append(f"error of the outputs {number(report.output_error)}")
    return text.append(f", {report.num_batches} batches" if report.num_batches > 1 else "")


def _table(report: AccuracyReport, rows: list[Row]) -> Table:
    folded = ("stage", "module", "op")
    table = new_table(
        *folded, "x", "in", "local", "accum.", "of loss", "range", folded=folded, right=("x",)
    )
    for row in rows:
        first = row.nodes[0]
        dtype = next((n.dtype for n in row.nodes if n.local), first.dtype)
        table.add_row(
            first.stage,
            folded_path(n.module for n in row.nodes) or "-",
            first.label,
            times(len(row.nodes)),
            dtype_cell(dtype),
            number(max(n.local for n in row.nodes)),
            number(max(n.accumulated for n in row.nodes)),
            _part(row.effect, report.loss_magnitude),
            _range(row),
        )
    return table


def _part(effect: float, loss: float | None) -> str:
    if not effect or not loss or not math.isfinite(loss):
        return "-"
    return share(effect / abs(loss))


def _range(row: Row) -> str:
    if row.overflows:
        return f"{row.overflows} overflow"
    flushed, nonzero = sum(n.flushed for n in row.nodes), sum(n.nonzero for n in row.nodes)
    if flushed:
        return f"{share(flushed / nonzero)} flushed"
    room = min((n.headroom for n in row.nodes if n.dtype == "float16"), default=math.inf)
    return f"{room:.0f} bits left" if math.isfinite(room) else ""


def _notes(report: AccuracyReport, num_rows: int) -> list[Text]:
    lines = []
    if num_rows > MOST:
        lines.append(f"{num_rows - MOST} more rows: report.nodes")
    if report.error is not None and math.isfinite(report.error):
        lines.append(
            f"error of the loss {number(report.error)}, to first order "
            f"{number(report.predicted_error)}"
        )
    worst = report.worst_gradient
    if report.loss is not None and not math.isfinite(report.loss):
        lines.append(f"the loss is {report.loss}, so there are no gradients to compare")
    elif worst is not None:
        lines.append(
            f"error of the gradients {number(report.gradient_error)}; the worst is {worst.name}, "
            f"cosine {worst.cosine:.6f}"
        )
    if report.dtype == "float16" and report.flushed_gradients:
        lines.append(
            f"{share(report.flushed_gradients)} of the elements of low gradients are flushed to "
            f"zero at scale {report.scale:g}; {_scale_words(report)}"
        )
    if report.is_repeatable is False:
        lines.append("two runs gave different losses: the program differs from run to run")
    for missing in report.not_examined[:MOST]:
        where = f" in {missing.module}" if missing.module else ""
        lines.append(f"not examined: {missing.op}{where}: {missing.why}")
    lines.append(f"took {human(report.memory.actual)} of memory")
    return [Text(line) for line in lines]


def _scale_words(report: AccuracyReport) -> str:
    if report.suggested_scale is None:
        return "no scale does for all"
    low, high = report.suggested_scale
    return f"scales from {low:g} to {high:g} would do"
