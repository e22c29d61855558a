"""Compares two reports of one step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from amp_fx.numerics.records import number
from amp_fx.reports import Report, as_plain, new_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from amp_fx.numerics.records import OpRecord, Suspect
    from amp_fx.numerics.report import AccuracyReport


@dataclasses.dataclass(frozen=True)
class OpChange:
    """One op whose error or dtype is another; None where a report has no such op."""

    before: OpRecord | None
    after: OpRecord | None


@dataclasses.dataclass(frozen=True)
class ReportDiff(Report):
    """The differences between two reports.

    Attributes:
        before: The first one.
        after: The second one.
        gone: Suspects that only the first one has.
        new: Suspects that only the second one has.
        changes: Ops that run in another dtype, or that only one of them has.
    """

    before: AccuracyReport
    after: AccuracyReport
    gone: tuple[Suspect, ...]
    new: tuple[Suspect, ...]
    changes: tuple[OpChange, ...]

    def to_dict(self) -> dict[str, Any]:
        """The suspects and ops that differ, by the names of the attributes."""
        fields = {"gone": self.gone, "new": self.new, "changes": self.changes}
        plain: dict[str, Any] = as_plain(fields)
        return plain

    def _render(self) -> RenderableType:
        lines = [
            Text(f"loss {self.before.loss} -> {self.after.loss}"),
            Text(f"error {number(self.before.output_error)} -> {number(self.after.output_error)}"),
            *(Text(f"gone: {suspect}") for suspect in self.gone),
            *(Text(f"new: {suspect}") for suspect in self.new),
        ]
        return Group(*lines, _table(self.changes)) if self.changes else Group(*lines)


def compare(before: AccuracyReport, after: AccuracyReport) -> ReportDiff:
    """Compares two reports."""

    def keys(report: AccuracyReport) -> set[tuple[str, str, str]]:
        return {(s.stage, s.module, s.op) for s in report.suspects}

    old, new = keys(before), keys(after)
    return ReportDiff(
        before,
        after,
        tuple(s for s in before.suspects if (s.stage, s.module, s.op) not in new),
        tuple(s for s in after.suspects if (s.stage, s.module, s.op) not in old),
        tuple(_changes(before, after)),
    )


def _changes(before: AccuracyReport, after: AccuracyReport) -> list[OpChange]:
    old, new = _by_place(before), _by_place(after)
    found = []
    for key in {**old, **new}:
        first, second = old.get(key), new.get(key)
        if first is None or second is None or first.dtype != second.dtype:
            found.append(OpChange(first, second))
    return found


def _by_place(report: AccuracyReport) -> dict[tuple[str, str, str, str, int], OpRecord]:
    counts: dict[tuple[str, str, str, str], int] = {}
    found = {}
    for node in report.nodes:
        key = (node.stage, node.module, node.op, node.kernel)
        counts[key] = counts.get(key, 0) + 1
        found[(*key, counts[key])] = node
    return found


def _table(changes: tuple[OpChange, ...]) -> Table:
    names = ("stage", "module", "op", "before", "after")
    table = new_table(*names, folded=names)
    for change in changes:
        node = change.before or change.after
        assert node is not None
        table.add_row(
            node.stage, node.module or "-", node.label, _cell(change.before), _cell(change.after)
        )
    return table


def _cell(node: OpRecord | None) -> str:
    return "-" if node is None else f"{node.dtype}, error {number(node.accumulated)}"
