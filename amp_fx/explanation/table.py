"""Renders explanations as tables with rich."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from amp_fx.reports import dtype_cell, first_of, human, new_table, times

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from amp_fx.explanation.records import GraphRecord, NodeRecord, Totals


def bare_op(op: str) -> str:
    """Returns an op's name without its namespace: ``linear`` for ``aten.linear``, ``F.linear``."""
    name = op.removeprefix("aten.").partition(".")[0] if op.startswith("aten.") else op
    return name.rpartition(".")[2]


def without_numbers(path: str) -> str:
    """Replaces numbers in a path by ``#``, so that paths of repeated modules are equal."""
    return re.sub(r"\d+", "#", path)


def folded_path(paths: Iterable[str]) -> str:
    """Combines paths that differ in numbers, such as ``layers.0-11.attn``."""
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
    """Returns sorted numbers as ranges: ``0-3,5`` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def summary(totals: Totals, stage: str) -> Text:
    """Returns a few lines on the graphs of a stage: ``"forward"`` or ``"backward"``."""
    from rich.text import Text

    ops = ", ".join(f"{count} {dtype}" for dtype, count in totals.ops_by_dtype.items())
    lines = [
        f"{stage}: {_count(totals.num_graphs, 'graph')}, {_count(totals.num_ops, 'op')}"
        + (f" ({ops})" if ops else "")
    ]
    if stage == "forward":
        lines.append(
            f"  casts  {totals.casts_put_in} inserted: {totals.casts_left} in every call"
            f" ({human(totals.bytes_cast)}), {totals.casts_cached} cached,"
            f" {totals.casts_removed} removed"
        )
    else:
        lines.append(f"  casts  {totals.casts_left} ({human(totals.bytes_cast)})")
    if totals.casts_cached:
        lines.append(f"  cached casts of weights move {human(totals.bytes_saved)} less per call")
    if totals.values_cached:
        values = _count(totals.values_cached, "value")
        lines.append(f"  cached {values} computed from weights take {human(totals.value_bytes)}")
    return Text("\n".join(lines))


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def graph_parts(graph: GraphRecord, num_graphs: int, *, shows_all: bool) -> list[RenderableType]:
    """Returns the ops of a graph by module, reasons for their treatments, and uncached weights."""
    from rich.text import Text

    autocast = ", ".join(graph.autocast) or "no autocast"
    number = f"graph {graph.index}, " if num_graphs > 1 else ""
    title = Text(f"{number}{autocast}", style="bold")
    kinds = {node.name: node.kind for node in graph.nodes}
    casts = {node.name: _casts_among(kinds.get(n) for n in node.inputs) for node in graph.nodes}
    ops = [node for node in graph.nodes if node.kind in ("op", "opaque")]
    shown = [n for n in ops if shows_all or not n.is_view or n.decisions or casts[n.name]]
    parts: list[RenderableType] = [Text(""), title, _ops_table(shown, casts)]
    parts += [Text("why", style="bold"), _reasons_table(shown)]
    if graph.uncached:
        parts += [Text("not cached", style="bold"), _uncached_table(graph.uncached)]
    if len(shown) < len(ops):
        hidden = _count(len(ops) - len(shown), "view")
        parts.append(Text(f"{hidden} not shown, which decide nothing (all=True or --all)"))
    return parts


def _ops_table(nodes: Iterable[NodeRecord], casts: Mapping[str, str]) -> Table:
    """Returns one row for all ops that differ only in the numbers of their modules."""
    from rich.text import Text

    table = new_table("op", "x", "in", "casts", "policy", folded=("op", "policy"), right=("x",))
    groups: dict[tuple[str, ...], list[NodeRecord]] = {}
    for node in nodes:
        row = (node.op, node.dtype, node.treatment, casts[node.name])
        groups.setdefault((without_numbers(node.module), *row), []).append(node)
    module = None
    for (_, op, dtype, treatment, before), group in groups.items():
        path = folded_path(node.module for node in group)
        if path != module:
            table.add_row(Text(path or "(root)", style="bold"))
            module = path
        table.add_row(f"  {bare_op(op)}", times(len(group)), dtype_cell(dtype), before, treatment)
    return table


def _casts_among(kinds: Iterable[str | None]) -> str:
    """Returns the numbers of casts among inputs, such as ``1+2 cached``."""
    counts = Counter(kinds)
    texts = {"cast": "{}", "cached_cast": "{} cached"}
    return "+".join(text.format(counts[kind]) for kind, text in texts.items() if counts[kind])


def _reasons_table(nodes: Iterable[NodeRecord]) -> Table:
    """Returns one row per reason, with the ops that it applies to."""
    from rich.table import Table

    ops: dict[str, dict[str, dict[str, None]]] = {}
    for node in nodes:
        entries = [(d.treatment, d.reason, d.op.removeprefix("aten::")) for d in node.decisions]
        for treatment, reason, op in entries or [(node.treatment, node.reason, bare_op(node.op))]:
            text = reason.removeprefix(f"{treatment}: ")
            ops.setdefault(treatment, {}).setdefault(text, {})[op.partition(".")[0]] = None
    table = Table.grid(padding=(0, 1))
    for treatment, reasons in ops.items():
        for i, (reason, names) in enumerate(reasons.items()):
            label = f"  {treatment}" if i == 0 else ""
            table.add_row(label, f"{', '.join(names)}: {reason}")
    return table


def _uncached_table(uncached: Iterable[tuple[str, str]]) -> Table:
    """Returns one row per reason, with the weights without a cached value."""
    from rich.table import Table

    weights: dict[str, dict[str, list[str]]] = {}
    for weight, reason in uncached:
        weights.setdefault(reason, {}).setdefault(without_numbers(weight), []).append(weight)
    table = Table.grid(padding=(0, 1))
    for reason, groups in weights.items():
        names = [folded_path(group) for group in groups.values()]
        table.add_row(f"  {', '.join(first_of(names, _MOST))}: {reason}")
    return table


def notes_on(graphs: Iterable[GraphRecord], breaks: Iterable[str]) -> list[str]:
    """Returns lines on removed casts, graph breaks and fallbacks."""
    removed = [cast for graph in graphs for cast in graph.casts if cast.state == "removed"]
    names = first_of([f"{cast.name}, {cast.removed_by}" for cast in removed], _MOST)
    lines = [f"removed: {name}" for name in names]
    lines += [f"graph break: {reason}" for reason in breaks]
    return [*lines, *(f"fallback: graph {g.index}: {g.fallback}" for g in graphs if g.fallback)]


_MOST = 8
