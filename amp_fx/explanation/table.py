"""An explanation as a table for the terminal, through rich."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from amp_fx.reports import dtype_cell, human, new_table, times

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.console import RenderableType

    from amp_fx.explanation.explanation import Explanation
    from amp_fx.explanation.records import GraphRecord, NodeRecord, Totals

CASTS = ("cast", "kept_cast")
"""Kinds of nodes that stand for a cast."""


def bare_op(op: str) -> str:
    """``linear`` for ``aten.linear``, ``F.linear`` and ``.linear``."""
    name = op.removeprefix("aten.").partition(".")[0] if op.startswith("aten.") else op
    return name.rpartition(".")[2]


def without_numbers(path: str) -> str:
    """A path with every number as ``#``: equal for like modules of a list."""
    return re.sub(r"\d+", "#", path)


def folded_path(paths: Iterable[str]) -> str:
    """One path for several that differ in numbers: ``layers.0-11.attn``."""
    parts = [re.split(r"(\d+)", path) for path in dict.fromkeys(paths)]
    if len(parts) == 1:
        return "".join(parts[0])
    return "".join(_folded(column) for column in zip(*parts, strict=True))


def _folded(column: tuple[str, ...]) -> str:
    distinct = list(dict.fromkeys(column))
    if len(distinct) == 1:
        return distinct[0]
    return number_ranges(sorted(map(int, distinct)))


def number_ranges(numbers: Iterable[int]) -> str:
    """``0-3,5`` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def render(explanation: Explanation) -> RenderableType:
    """The table as something that rich prints."""
    parts: list[RenderableType] = [_head(explanation), _summary(explanation.totals, "forward")]
    if explanation.backward:
        parts.append(_summary(explanation.backward_totals, "backward"))
    for graph in explanation.forward:
        parts += [Text(""), _graph_title(graph, len(explanation.forward))]
        parts += _of_graph(graph, shows_all=explanation.shows_all)
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
    ]
    if stage == "forward":
        lines.append(
            f"  casts  {totals.casts_put_in} inserted: {totals.casts_left} in every call"
            f" ({human(totals.bytes_cast)}), {totals.casts_kept} kept,"
            f" {totals.casts_removed} removed"
        )
    else:
        lines.append(f"  casts  {totals.casts_left} ({human(totals.bytes_cast)})")
    if totals.casts_kept:
        lines.append(f"  kept   casts of weights move {human(totals.bytes_kept)} less per call")
    if totals.values_kept:
        values = _count(totals.values_kept, "value")
        lines.append(f"  cached {values} computed from weights take {human(totals.value_bytes)}")
    return Text("\n".join(lines))


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _graph_title(graph: GraphRecord, num_graphs: int) -> Text:
    autocast = ", ".join(graph.autocast) or "no autocast"
    number = f"graph {graph.index}, " if num_graphs > 1 else ""
    return Text(f"{number}{autocast}", style="bold")


def _of_graph(graph: GraphRecord, *, shows_all: bool) -> list[RenderableType]:
    """Returns the ops of a graph by module, and the reasons for their treatments."""
    casts = {node.name: _casts_before(node, graph) for node in graph.nodes}
    ops = [node for node in graph.nodes if node.kind in ("op", "island")]
    shown = [n for n in ops if shows_all or not n.is_view or n.decisions or casts[n.name]]
    parts: list[RenderableType] = [_ops_table(shown, casts), Text("why", style="bold")]
    parts.append(_reasons_table(shown))
    if len(shown) < len(ops):
        hidden = _count(len(ops) - len(shown), "view")
        parts.append(Text(f"{hidden} not shown, which decide nothing (all=True or --all)"))
    return parts


def _ops_table(nodes: Iterable[NodeRecord], casts: Mapping[str, str]) -> Table:
    """Ops that differ only in the numbers of their modules are one row."""
    table = new_table("op", "x", "in", "casts", "policy", folded=("op", "policy"), right=("x",))
    groups: dict[tuple[str, ...], list[NodeRecord]] = {}
    for node in nodes:
        row = (node.op, node.dtype, node.treatment, casts[node.name])
        groups.setdefault((without_numbers(node.module), *row), []).append(node)
    module = None
    for (_, op, dtype, treatment, before), alike in groups.items():
        path = folded_path(node.module for node in alike)
        if path != module:
            table.add_row(Text(path or "(root)", style="bold"))
            module = path
        table.add_row(f"  {bare_op(op)}", times(len(alike)), dtype_cell(dtype), before, treatment)
    return table


def _casts_before(node: NodeRecord, graph: GraphRecord) -> str:
    kinds = Counter(other.kind for other in graph.nodes if other.name in node.inputs)
    parts = [f"{kinds['cast']}"] if kinds["cast"] else []
    return "+".join([*parts, *([f"{kinds['kept_cast']} kept"] if kinds["kept_cast"] else [])])


def _reasons_table(nodes: Iterable[NodeRecord]) -> Table:
    """Each reason once, with the ops that it holds for."""
    ops: dict[str, dict[str, dict[str, None]]] = {}
    for node in nodes:
        found = [(d.treatment, d.reason, d.op.removeprefix("aten::")) for d in node.decisions]
        for treatment, reason, op in found or [(node.treatment, node.reason, bare_op(node.op))]:
            said = reason.removeprefix(f"{treatment}: ")
            ops.setdefault(treatment, {}).setdefault(said, {})[op.partition(".")[0]] = None
    table = Table.grid(padding=(0, 1))
    for treatment, reasons in ops.items():
        for i, (reason, names) in enumerate(reasons.items()):
            table.add_row(f"  {treatment}" * (i == 0), f"{', '.join(names)}: {reason}")
    return table


def _notes(explanation: Explanation) -> list[Text]:
    removed = [cast for cast in explanation.casts if cast.state == "removed"]
    lines = [f"removed: {c.name}, {c.removed_by}" for c in removed[:_MOST]]
    if len(removed) > _MOST:
        lines.append(f"removed: {len(removed) - _MOST} more")
    lines += [f"graph break: {reason}" for reason in explanation.breaks]
    lines += [f"fallback: graph {g.index}: {g.fallback}" for g in explanation.forward if g.fallback]
    lines += [explanation.products] if explanation.products else []
    return [Text(line) for line in lines]


_MOST = 8
