"""Compares two explanations of the same model."""

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
    """One op with different treatments.

    Attributes:
        module: Path of its module.
        op: Name of the captured op.
        dtypes: Its compute dtypes in both explanations; ``""`` if it is missing.
        treatments: Its policies in both explanations.
    """

    module: str
    op: str
    dtypes: tuple[str, str]
    treatments: tuple[str, str]


@dataclasses.dataclass(frozen=True, repr=False)
class Diff(Report):
    """Differences between two explanations. Prints as a table.

    Attributes:
        names: Policy, device and dtype of each explanation.
        totals: Both values of each field of ``records.Totals`` that differs.
        nodes: The ops with different treatments.
        backward_totals: As ``totals``, for the backward graphs.
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
        """Returns a summary in one line."""
        return f"<Diff: {len(self.nodes)} ops and {len(self.totals)} totals differ>"


def compare(first: Explanation, second: Explanation) -> Diff:
    """Compares two explanations. Ops are matched by module, name of the captured op, and order."""
    left, right = _keyed(first), _keyed(second)
    differences = []
    for module, op in dict.fromkeys([*left, *right]):
        key = module, op
        for a, b in zip_longest(left.get(key, ()), right.get(key, ())):
            (left_dtype, left_treatment), (right_dtype, right_treatment) = _facts(a), _facts(b)
            dtypes, treatments = (left_dtype, right_dtype), (left_treatment, right_treatment)
            if left_dtype != right_dtype or left_treatment != right_treatment:
                differences.append(NodeDifference(module, op, dtypes, treatments))
    return Diff(
        names=(_describe(first), _describe(second)),
        totals=_differing(vars(first.totals), vars(second.totals)),
        nodes=tuple(differences),
        backward_totals=_differing(vars(first.backward_totals), vars(second.backward_totals)),
    )


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns both values of each key whose values differ."""
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}


def _describe(explanation: Explanation) -> str:
    return f"{explanation.policy} {explanation.device_type} {explanation.dtype}"


def _keyed(explanation: Explanation) -> dict[tuple[str, str], list[NodeRecord]]:
    """Returns nodes by module and bare op, because decomposed nodes have ATen names."""
    nodes: dict[tuple[str, str], list[NodeRecord]] = {}
    for node in explanation.nodes:
        if node.kind in ("op", "island"):
            nodes.setdefault((node.module, bare_op(node.op)), []).append(node)
    return nodes


def _facts(node: NodeRecord | None) -> tuple[str, str]:
    """Returns the dtype and the treatment of a node; empty strings if it is missing."""
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
    for (_, op, dtypes, treatments), nodes in groups.items():
        cells = [
            " ".join(filter(None, pair)) or "-" for pair in zip(dtypes, treatments, strict=True)
        ]
        module = folded_path(node.module for node in nodes) or "-"
        table.add_row(module, op, times(len(nodes)), *cells)
    return table


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_shown(v)}" for k, v in value.items()) or "-"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
