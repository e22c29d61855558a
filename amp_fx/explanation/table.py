"""An explanation as a table for the terminal, through rich."""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from amp_fx.explanation.rows import bare_op, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from amp_fx.explanation.explanation import Explanation
    from amp_fx.explanation.records import CollectiveRecord, GraphRecord, StepRecord
    from amp_fx.explanation.totals import Totals

SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int64": "i64",
    "int32": "i32",
    "complex64": "c64",
}
"""Short names of dtypes, where room is scarce."""

STYLES = {"bfloat16": "green", "float16": "green", "float32": "yellow", "float64": "red"}


def as_text(explanation: Explanation, width: int | None = None) -> str:
    """The table as plain text.

    Args:
        explanation: What to show.
        width: Columns; None takes those of the terminal, or what it needs where there is none.
    """
    return printed(render(explanation), width)


def printed(shown: RenderableType, width: int | None = None) -> str:
    """What rich prints, as plain text.

    In a notebook rich would show it at once and, told by ``FORCE_COLOR``, set words in bold.
    """
    file = io.StringIO()
    width = piped_width() if width is None else width
    Console(file=file, width=width, force_terminal=False, force_jupyter=False).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def piped_width() -> int | None:
    """Columns for what no terminal shows: no line is folded, so that names can be searched for.

    None where a terminal, or ``COLUMNS``, says how many there are.
    """
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH


PIPED_WIDTH = 1000


def as_html(explanation: Explanation) -> str:
    """The table as HTML, for notebooks."""
    return printed_html(render(explanation))


def printed_html(shown: RenderableType) -> str:
    """What rich prints, as HTML."""
    console = Console(file=io.StringIO(), width=110, record=True, force_jupyter=False)
    console.print(shown)
    style = "font-family: monospace; font-size: 12px; line-height: 1.25"
    form = f'<pre style="{style}">{{code}}</pre>'
    return console.export_html(inline_styles=True, code_format=form)


def render(explanation: Explanation) -> RenderableType:
    """The table as something that rich prints."""
    parts: list[RenderableType] = [_head(explanation), _summary(explanation.totals, "forward")]
    parts += _of_passes(explanation)
    if explanation.backward:
        parts.append(_summary(explanation.backward_totals, "backward"))
    if explanation.step is not None:
        parts.append(_of_step(explanation.step))
    for graph in explanation.forward:
        parts += [Text(""), _graph_title(graph, len(explanation.forward)), _graph_table(graph)]
    if any(graph.collectives for graph in explanation.graphs):
        parts += [Text(""), collectives_table(explanation.graphs)]
    notes = _notes(explanation)
    return Group(*parts, *([Text(""), *notes] if notes else []))


def _head(explanation: Explanation) -> Text:
    where = f"{explanation.device_type} {explanation.dtype}"
    imagined = " (device not here: op tables of it, on fake tensors)"
    text = Text.assemble((explanation.model, "bold"), f" on {where}, policy {explanation.policy!r}")
    return text.append(imagined if explanation.is_imagined else "")


def _summary(totals: Totals, stage: str) -> Text:
    share = ", ".join(f"{part:.1%} {dtype}" for dtype, part in totals.flop_share.items())
    ops = ", ".join(f"{count} {dtype}" for dtype, count in totals.ops_by_dtype.items())
    lines = [
        f"{stage}: {_count(totals.num_graphs, 'graph')}, {_count(totals.num_ops, 'op')}"
        + (f" ({ops})" if ops else ""),
        f"  FLOPs  {human(sum(totals.flops.values()), '')}: {share or 'none'}",
        f"  bytes  {human(totals.bytes_read)} read, {human(totals.bytes_written)} written, op by op"
        + (f" ({_count(totals.num_uncounted, 'op')} not counted)" if totals.num_uncounted else ""),
    ]
    if totals.num_kernels:
        kernels = _count(totals.num_kernels, "kernel")
        lines.append(f"  fused  {human(totals.fused_bytes)} read and written by {kernels}")
    if stage == "forward":
        lines.append(
            f"  casts  {totals.casts_put_in} put in: {totals.casts_left} in every call"
            f" ({human(totals.bytes_cast)}), {totals.casts_kept} kept,"
            f" {totals.casts_removed} taken out"
        )
        lines += _kept(totals)
    else:
        lines.append(f"  casts  {totals.casts_left} ({human(totals.bytes_cast)})")
        lines.append(f"  saved  {human(totals.saved_bytes)} by the forward")
    if totals.bytes_sent_before:
        less = f" ({human(totals.wire_bytes_before)} before narrow_gathers)"
        is_less = totals.wire_bytes < totals.wire_bytes_before
        lines.append(f"  wire   {human(totals.wire_bytes)} sent{less if is_less else ''}")
    return Text("\n".join(lines))


def _of_passes(explanation: Explanation) -> list[Text]:
    """What passes did to the bytes of casts, summed over the forward graphs."""
    changed: Counter[str] = Counter()
    for graph in explanation.forward:
        for each in graph.passes:
            changed[each.name] += each.bytes_changed
    told = [f"{name} {_signed(number)}" for name, number in changed.items() if number]
    return [Text(f"  passes {', '.join(told)}")] if told else []


def _signed(number: int) -> str:
    return f"{'-' if number < 0 else '+'}{human(abs(number))}"


def _of_step(step: StepRecord) -> Text:
    kind = f", {step.kind}" if step.kind else ""
    refresh = f", {human(step.refresh_bytes)} of them for kept casts" if step.refresh_bytes else ""
    moved = step.bytes_read + step.bytes_written + step.refresh_bytes
    return Text(
        f"step: {step.optimizer}{kind}, {human(step.num_parameters, '')} parameters\n"
        f"  bytes  {human(moved)}, {step.bytes_per_parameter:.1f} per parameter{refresh}"
    )


def _kept(totals: Totals) -> list[str]:
    lines = []
    if totals.casts_kept:
        memory = "" if totals.values_kept else f", take {human(totals.copy_bytes)}"
        lines.append(
            f"  kept   casts of weights save {human(totals.bytes_kept)} of traffic per call{memory}"
        )
    if totals.values_kept:
        values = _count(totals.values_kept, "value")
        lines.append(f"  frozen {values} made of weights alone take {human(totals.value_bytes)}")
    return lines


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _graph_title(graph: GraphRecord, num_graphs: int) -> Text:
    autocast = ", ".join(graph.autocast) or "no autocast"
    number = f"graph {graph.index}, " if num_graphs > 1 else ""
    return Text(f"{number}{autocast}", style="bold")


def _graph_table(graph: GraphRecord) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("module", overflow="fold")
    table.add_column("op", overflow="fold")
    table.add_column("x", justify="right", no_wrap=True)
    table.add_column("in", no_wrap=True)
    table.add_column("policy", overflow="fold")
    table.add_column("casts", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for row in rows_of(graph):
        dtype = Text(SHORT.get(row.dtype, row.dtype), style=STYLES.get(row.dtype, ""))
        times = str(len(row.nodes)) if len(row.nodes) > 1 else ""
        casts = _casts(row.num_casts, row.num_kept)
        moved = sum(node.bytes_moved for node in row.nodes)
        size = human(moved) if moved else ""
        table.add_row(row.module or "-", bare_op(row.op), times, dtype, row.treatment, casts, size)
    return table


def collectives_table(graphs: Iterable[GraphRecord]) -> Table:
    """What graphs send, alike collectives as one row each."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("in", "sends by", "x", "ranks", "dtype", "sent", "before"):
        table.add_column(name, no_wrap=True)
    rows: dict[tuple[str, ...], list[CollectiveRecord]] = {}
    for graph in graphs:
        for each in graph.collectives:
            key = (graph.stage, each.op, str(each.group_size or "?"), each.dtype)
            rows.setdefault(key, []).append(each)
    for (stage, op, ranks, dtype), found in rows.items():
        sent = sum(each.wire_bytes for each in found)
        before = sum(each.wire_bytes_before for each in found)
        sizes = human(sent), human(before) if before != sent else ""
        times = str(len(found)) if len(found) > 1 else ""
        table.add_row(stage, op, times, ranks, SHORT.get(dtype, dtype), *sizes)
    return table


def _casts(num_casts: int, num_kept: int) -> str:
    parts = [f"{num_casts}"] if num_casts else []
    return "+".join([*parts, *([f"{num_kept} kept"] if num_kept else [])])


def _notes(explanation: Explanation) -> list[Text]:
    removed = [cast for cast in explanation.casts if cast.state == "removed"]
    lines = [f"taken out: {c.name}, {c.removed_by}" for c in removed[:_MOST]]
    if len(removed) > _MOST:
        lines.append(f"taken out: {len(removed) - _MOST} more")
    lines += [f"graph break: {reason}" for reason in explanation.breaks]
    lines += [
        f"island: {island.op}{f' in {island.module}' if island.module else ''}: {island.reason}"
        for graph in explanation.forward
        for island in graph.islands
    ]
    lines += [f"fallback: graph {g.index}: {g.fallback}" for g in explanation.forward if g.fallback]
    return [Text(line) for line in lines]


_MOST = 8


def human(number: float, unit: str = "B") -> str:
    """A number with a prefix: ``1.5 MB``, ``27 M``."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 1000:
            digits = f"{number:.0f}" if not prefix or number >= 100 else f"{number:.1f}"
            return f"{digits} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.1f} P{unit}"
