"""Compares two explanations of one model."""

from __future__ import annotations

import dataclasses
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table

from amp_fx.explanation.table import bare_op, folded_path, without_numbers
from amp_fx.reports import Report, times

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from amp_fx.explanation.explanation import Explanation
    from amp_fx.explanation.records import NodeRecord


@dataclasses.dataclass(frozen=True)
class NodeDifference:
    """One op that is treated otherwise.

    Attributes:
        module: Its module.
        op: What it calls, as captured.
        dtypes: The dtypes that it runs in, here and there; ``""`` where it is missing.
        treatments: Its policies, here and there.
    """

    module: str
    op: str
    dtypes: tuple[str, str]
    treatments: tuple[str, str]


@dataclasses.dataclass(frozen=True, repr=False)
class Diff(Report):
    """The differences between two explanations; printed, they are a table.

    Attributes:
        names: What each explanation is: policy, device and dtype.
        totals: By the field of ``records.Totals`` that differs, both values.
        nodes: The ops that are treated otherwise.
        backward_totals: As ``totals``, of the backward graphs.
    """

    names: tuple[str, str]
    totals: dict[str, tuple[Any, Any]]
    nodes: tuple[NodeDifference, ...]
    backward_totals: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        """Returns True if anything differs."""
        return bool(self.totals or self.nodes or self.backward_totals)

    def _render(self) -> RenderableType:
        parts = [_totals_table("", self.totals, self.names)] if self.totals else []
        if self.backward_totals:
            parts.append(_totals_table("backward", self.backward_totals, self.names))
        parts += [_nodes_table(self)] if self.nodes else []
        return Group(*parts) if parts else "no difference"

    def __repr__(self) -> str:
        """One line."""
        return f"<Diff: {len(self.nodes)} ops and {len(self.totals)} totals differ>"


def compare(ours: Explanation, other: Explanation) -> Diff:
    """Compares two explanations; ops are matched by module, op as captured, and order."""
    left, right = _keyed(ours), _keyed(other)
    keys = list(dict.fromkeys([*left, *right]))
    pairs = [
        (key, *pair) for key in keys for pair in zip_longest(left.get(key, ()), right.get(key, ()))
    ]
    nodes = tuple(
        NodeDifference(*key, *zip(_facts(a), _facts(b), strict=True))
        for key, a, b in pairs
        if _facts(a) != _facts(b)
    )
    return Diff(
        names=(_describe(ours), _describe(other)),
        totals=_differing(vars(ours.totals), vars(other.totals)),
        nodes=nodes,
        backward_totals=_differing(vars(ours.backward_totals), vars(other.backward_totals)),
    )


def _differing(ours: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns both values of each key whose values differ."""
    return {key: (ours[key], other[key]) for key in ours if ours[key] != other[key]}


def _describe(explanation: Explanation) -> str:
    return f"{explanation.policy} {explanation.device_type} {explanation.dtype}"


def _keyed(explanation: Explanation) -> dict[tuple[str, str], list[NodeRecord]]:
    """Nodes by module and the op as a person wrote it: opened nodes are named otherwise."""
    found: dict[tuple[str, str], list[NodeRecord]] = {}
    for node in explanation.nodes:
        if node.kind in ("op", "island"):
            found.setdefault((node.module, bare_op(node.op)), []).append(node)
    return found


def _facts(node: NodeRecord | None) -> tuple[Any, ...]:
    """Returns the dtype and the treatment of a node; empty ones if it is missing."""
    return (node.dtype, node.treatment) if node else ("", "")


def _new_table(*columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)


def _totals_table(title: str, totals: Mapping[str, Any], names: tuple[str, str]) -> Table:
    table = _new_table(title, *names)
    for name, (a, b) in totals.items():
        table.add_row(name, _shown(a), _shown(b))
    return table


def _nodes_table(diff: Diff) -> Table:
    table = _new_table("module", "op", "x", *diff.names)
    groups: dict[tuple[Any, ...], list[NodeDifference]] = {}
    for node in diff.nodes:
        key = (without_numbers(node.module), node.op, node.dtypes, node.treatments)
        groups.setdefault(key, []).append(node)
    for (_, op, dtypes, treatments), found in groups.items():
        cells = [
            " ".join(filter(None, pair)) or "-" for pair in zip(dtypes, treatments, strict=True)
        ]
        module = folded_path(n.module for n in found) or "-"
        table.add_row(module, op, times(len(found)), *cells)
    return table


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_shown(v)}" for k, v in value.items()) or "-"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
