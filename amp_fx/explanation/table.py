"""An explanation as a table for the terminal, through rich."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from amp_fx.reports import dtype_cell, human, new_table, times

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType
    from rich.table import Table

    from amp_fx.explanation.explanation import Explanation
    from amp_fx.explanation.records import GraphRecord, NodeRecord, Totals

CASTS = ("cast", "kept_cast")
"""Kinds of nodes that stand for a cast."""


def treatment(node: NodeRecord) -> str:
    """A node's policies and where they come from, in a few words."""
    policies = ", ".join(dict.fromkeys(d.policy for d in node.decisions))
    if not policies:
        return node.origin
    return policies if node.origin == "table" else f"{policies} ({node.origin})"


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
        parts += [Text(""), _graph_title(graph, len(explanation.forward)), _graph_table(graph)]
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
            f"  casts  {totals.casts_put_in} put in: {totals.casts_left} in every call"
            f" ({human(totals.bytes_cast)}), {totals.casts_kept} kept,"
            f" {totals.casts_removed} taken out"
        )
        lines += _kept(totals)
    else:
        lines.append(f"  casts  {totals.casts_left} ({human(totals.bytes_cast)})")
    return Text("\n".join(lines))


def _kept(totals: Totals) -> list[str]:
    lines = []
    if totals.casts_kept:
        lines.append(
            f"  kept   casts of weights save {human(totals.bytes_kept)} of traffic per call"
        )
    if totals.values_kept:
        values = _count(totals.values_kept, "value")
        lines.append(f"  cached {values} computed from weights take {human(totals.value_bytes)}")
    return lines


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _graph_title(graph: GraphRecord, num_graphs: int) -> Text:
    autocast = ", ".join(graph.autocast) or "no autocast"
    number = f"graph {graph.index}, " if num_graphs > 1 else ""
    return Text(f"{number}{autocast}", style="bold")


def _graph_table(graph: GraphRecord) -> Table:
    """The ops of a graph; those that differ only in the numbers of their modules are one row."""
    names = ("module", "op", "x", "in", "policy", "casts")
    table = new_table(*names, folded=("module", "op", "policy"), right=("x",))
    by_name = {node.name: node for node in graph.nodes}
    groups: dict[tuple[str, ...], list[NodeRecord]] = {}
    for node in graph.nodes:
        if node.kind in ("op", "island"):
            kinds = Counter(by_name[name].kind for name in node.inputs if name in by_name)
            casts = _casts(kinds["cast"], kinds["kept_cast"])
            key = (without_numbers(node.module), node.op, node.dtype, treatment(node), casts)
            groups.setdefault(key, []).append(node)
    for (_, op, dtype, treated, casts), nodes in groups.items():
        module = folded_path(node.module for node in nodes) or "-"
        table.add_row(module, bare_op(op), times(len(nodes)), dtype_cell(dtype), treated, casts)
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
    lines += [explanation.products] if explanation.products else []
    return [Text(line) for line in lines]


_MOST = 8
