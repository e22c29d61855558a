"""The report of ``amp_fx.accuracy``, its table, and its ops as an explanation."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.explanation.table import folded_path, without_numbers
from amp_fx.numerics.measures import relative
from amp_fx.numerics.records import grouped, limit_of, number, share
from amp_fx.numerics.suspects import find_suspects
from amp_fx.reports import Report, dtype_cell, new_table, stacked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType
    from rich.text import Text

    from amp_fx.numerics.records import GradientRecord, OpRecord, Suspect


MOST = 12
"""The largest number of rows of the table, and of lines of suspects."""


def rows_of(nodes: Iterable[OpRecord]) -> list[list[OpRecord]]:
    """Groups ops in rows: overflows first, then by the effect on the loss."""
    groups = grouped(nodes, lambda n: (n.stage, without_numbers(n.module), n.label))

    def rank(row: list[OpRecord]) -> tuple[bool, float]:
        return _overflows(row) == 0, -math.hypot(*(n.effect_rms for n in row))

    return sorted(groups.values(), key=rank)


def _overflows(row: list[OpRecord]) -> int:
    return sum(n.overflows + n.singular for n in row)


def render(report: AccuracyReport) -> RenderableType:
    """Renders the suspects, the table and the notes of a report."""
    from rich.text import Text

    parts: list[RenderableType] = [_head(report)]
    if report.roots:
        roots = ", ".join(f"{name} ({kind})" for name, kind in report.roots)
        parts.append(f"root modules: {roots}")
    problem = report.reference_problem
    if problem is not None:
        where = f" in {problem.module}" if problem.module else ""
        parts.append(f"float32 itself becomes infinite or NaN: first {problem.label}{where}")
    for place, suspect in enumerate(report.suspects[:MOST], 1):
        parts.append(Text(f"{place}. {suspect}", style="bold" if place == 1 else ""))
    if not report.suspects and problem is None:
        parts.append("no suspects")
    if len(report.suspects) > MOST:
        parts.append(f"... and {len(report.suspects) - MOST} more")
    rows = rows_of(report.nodes)
    cells = [_cells(row, report.reference_loss) for row in rows[:MOST]]
    table = new_table(*COLUMNS, rows=cells, folded=COLUMNS[:3], right=("count",))
    return stacked(*parts, "", table, "", LEGEND, "", *_notes(report, len(rows)))


COLUMNS = ("stage", "module", "op", "count", "in", "local", "accum.", "of loss", "range")


LEGEND = (
    "count: ops in the row; in: dtype of the results; local: largest error of one op on the same "
    "inputs; accum.: largest error since the start; of loss: change of the loss by local errors; "
    "range: overflows, values flushed to zero, or powers of two left below the limit"
)
"""The meaning of the columns."""


def _head(report: AccuracyReport) -> Text:
    from rich.text import Text

    text = Text.assemble(
        (report.model, "bold"), f" on {report.device_type} {report.dtype}, against float32: "
    )
    if report.modules is not None:
        text.append(f"only {', '.join(report.modules)}")
    elif report.loss is not None:
        text.append(f"loss {report.loss:.6g} ({report.reference_loss:.6g})")
    else:
        text.append(f"error of the outputs {number(report.output_error)}")
        if report.num_bad_outputs:
            text.append(
                f" if no op overflows; {report.num_bad_outputs} of their elements become infinite "
                "or NaN"
            )
    return text


def _cells(row: list[OpRecord], loss: float | None) -> tuple[str | Text, ...]:
    """Returns the cells of a row, given the loss of the reference program."""
    first = row[0]
    dtype = next((n.dtype for n in row if n.local), first.dtype)
    return (
        first.stage,
        folded_path(n.module for n in row) or "-",
        first.label,
        str(len(row)),
        dtype_cell(dtype),
        number(max(n.local for n in row)),
        number(max(n.accumulated for n in row)),
        _part(sum(n.effect or 0.0 for n in row), loss),
        _range(row),
    )


def _part(effect: float, loss: float | None) -> str:
    if not effect or not loss or not math.isfinite(loss):
        return "-"
    return share(effect / abs(loss))


def _range(row: list[OpRecord]) -> str:
    if _overflows(row):
        return f"{_overflows(row)} overflow"
    flushed, nonzero = sum(n.flushed for n in row), sum(n.nonzero for n in row)
    if flushed:
        return f"{share(flushed / nonzero)} flushed"
    room = min((n.headroom for n in row if n.dtype == "float16"), default=math.inf)
    return f"{room:.0f} bits left" if math.isfinite(room) else ""


def _notes(report: AccuracyReport, num_rows: int) -> list[str]:
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
    if report.dtype == "float16" and report.flushed_gradients and not report.is_probed:
        lines.append(
            f"{share(report.flushed_gradients)} of the elements of low gradients are flushed to "
            f"zero at scale {report.scale:g}; the largest scale without overflow is "
            f"{report.largest_scale:g}"
        )
    if report.is_repeatable is False:
        lines.append("two runs gave different losses: the program differs from run to run")
    for missing in report.not_examined[:MOST]:
        where = f" in {missing.module}" if missing.module else ""
        lines.append(f"not examined: {missing.op}{where}: {missing.why}")
    return lines


SCHEMA = 4
"""The version of ``to_dict``; raised when a key is removed or changes its meaning."""


@dataclasses.dataclass(frozen=True)
class UnexaminedRecord:
    """An op that could not be examined, and the reason. Its result is assumed to be exact."""

    op: str
    module: str
    why: str


@dataclasses.dataclass(frozen=True, repr=False)
class AccuracyReport(Report):
    """Describes how low precision changes a step: the loss, every op, every gradient.

    Attributes:
        model: The name of the step.
        dtype: The low dtype.
        device_type: The device type of the region.
        scale: The factor of the loss in the backward.
        loss: The loss in low precision; None if the step has none.
        reference_loss: The loss of the reference program; None if only some modules were examined.
        output_error: The relative error (L2) of the loss, or of all outputs; NaN if only some
            modules were examined.
        num_bad_outputs: The number of elements of the loss or of the outputs that are infinite or
            NaN in low precision, and finite in the reference. The error is that of a run in which
            overflows were replaced by the largest number.
        is_probed: True without a loss and a backward of the step: the examined backward began with
            random signs.
        is_repeatable: True if two runs in low precision had the same loss; None if that was not
            compared, or if an op overflowed.
        nodes: The ops with low dtypes or errors, in order.
        gradients: The gradients of parameters, and of inputs that require one; with ``modules``,
            those of parameters of these modules.
        not_examined: The ops that could not be examined.
        roots: The names and classes of the root modules, if there are several. Each path begins
            with the name of its root.
        modules: The patterns of the modules that were examined; None for the whole step.
    """

    computed = (
        "error",
        "predicted_error",
        "gradient_error",
        "flushed_gradients",
        "largest_scale",
        "suspects",
    )

    model: str
    dtype: str
    device_type: str
    scale: float
    loss: float | None
    reference_loss: float | None
    output_error: float
    is_probed: bool
    nodes: tuple[OpRecord, ...]
    gradients: tuple[GradientRecord, ...]
    not_examined: tuple[UnexaminedRecord, ...]
    num_bad_outputs: int = 0
    is_repeatable: bool | None = None
    roots: tuple[tuple[str, str], ...] = ()
    modules: tuple[str, ...] | None = None

    @functools.cached_property
    def suspects(self) -> tuple[Suspect, ...]:
        """The ops that cause harm, the worst first; empty for a sound program.

        The size of gradients that begin with random signs means nothing, so that ops of such a
        backward are no suspects.
        """
        if self.reference_problem is not None:
            return ()
        if self.is_probed:
            return find_suspects([node for node in self.nodes if node.stage == "forward"])
        room = max(1.0, self.largest_scale / self.scale)
        return find_suspects(self.nodes, room=room, gradient_error=self.gradient_error)

    @property
    def error(self) -> float | None:
        """The error of the loss in low precision; None without a loss."""
        if self.loss is None or self.reference_loss is None:
            return None
        return self.loss - self.reference_loss

    @property
    def predicted_error(self) -> float:
        """The sum of the first-order effects of all ops."""
        return sum(node.effect for node in self.nodes if node.effect is not None)

    @property
    def reference_problem(self) -> OpRecord | None:
        """The first measured op whose reference is NaN or infinite, if that of the loss is."""
        if self.modules is not None:
            return None  # the reference of the step is unknown
        is_fine = self.reference_loss is None or math.isfinite(self.reference_loss)
        if is_fine and math.isfinite(self.output_error):
            return None
        nans = [node for node in self.nodes if math.isnan(node.max_abs)]
        if self.reference_loss is None and not nans:
            return None
        infinite = [node for node in self.nodes if not node.is_finite]
        return next(iter(nans + infinite), None)

    @property
    def gradient_error(self) -> float:
        """The relative error (L2) of all gradients together; NaN if one of them is in float32."""
        if any(math.isnan(g.error) or math.isnan(g.norm) for g in self.gradients):
            return math.nan
        known = [g for g in self.gradients if math.isfinite(g.error)]
        error = math.hypot(*(g.error * g.norm for g in known))
        return relative(error**2, sum(g.norm**2 for g in known))

    @property
    def worst_gradient(self) -> GradientRecord | None:
        """The gradient with the smallest cosine, among those that are not negligible."""
        whole = math.hypot(*(g.norm for g in self.gradients))
        some = [g for g in self.gradients if not g.norm < whole / 1000]
        return min(some, key=lambda g: g.cosine, default=None)

    @property
    def largest_scale(self) -> float:
        """The largest scale of the loss, a power of two, at which float16 gradients stay finite.

        The largest gradient has two bits left then. Without float16 gradients, the scale of the
        report.
        """
        low = [n for n in self.nodes if n.stage == "backward" and n.dtype == "float16"]
        largest = max((n.max_abs for n in low if math.isfinite(n.max_abs)), default=0.0)
        if not largest:
            return self.scale
        return self.scale * 2.0 ** math.floor(math.log2(limit_of("float16") / 4 / largest))

    @property
    def flushed_gradients(self) -> float:
        """The share of elements of low gradients that are flushed to zero."""
        low = [node for node in self.nodes if node.stage == "backward" and node.nonzero]
        return sum(n.flushed for n in low) / max(1, sum(n.nonzero for n in low))

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as dictionaries, lists, strings and numbers.

        Keys: ``schema`` (``SCHEMA``), ``torch`` (its version), the attributes, and the names in
        ``computed``, of the report and of ``OpRecord``. Numbers that JSON lacks are strings:
        ``"nan"``, ``"inf"``.
        """
        return {"schema": SCHEMA, **super().to_dict(), "torch": torch.__version__}

    def _render(self) -> RenderableType:
        return render(self)
