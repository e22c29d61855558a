"""Nodes that are treated alike in like modules, as one row each."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amp_fx.explanation.records import GraphRecord, NodeRecord

CASTS = ("cast", "kept_cast", "copy")
"""Kinds of nodes that stand for a cast."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Some nodes that differ only in the numbers of their modules' paths.

    Attributes:
        module: Their module: ``"layers.0-11.attn"``.
        op: What they call.
        dtype: What they run in.
        treatment: Their policies and where those come from.
        num_casts: Casts that were put in for each of them and are made on every call.
        num_kept: Those that are kept.
        nodes: The nodes.
    """

    module: str
    op: str
    dtype: str
    treatment: str
    num_casts: int
    num_kept: int
    nodes: tuple[NodeRecord, ...]


def rows_of(graph: GraphRecord) -> list[Row]:
    """The rows of a graph, in the order of their first nodes."""
    by_name = {node.name: node for node in graph.nodes}
    groups: dict[tuple[str, str, str, str, int, int], list[NodeRecord]] = {}
    for node in graph.nodes:
        if node.kind not in ("op", "island"):
            continue
        kinds = [by_name[name].kind for name in node.inputs if name in by_name]
        key = (
            without_numbers(node.module),
            node.op,
            node.dtype,
            treatment(node),
            kinds.count("cast"),
            kinds.count("kept_cast") + kinds.count("copy"),
        )
        groups.setdefault(key, []).append(node)
    return [
        Row(folded_path(n.module for n in nodes), *key[1:], nodes=tuple(nodes))
        for key, nodes in groups.items()
    ]


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
