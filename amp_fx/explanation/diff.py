"""What differs between two explanations of one model."""

from __future__ import annotations

import dataclasses
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from amp_fx.explanation.rows import bare_op, folded_path, treatment, without_numbers

if TYPE_CHECKING:
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
class Diff:
    """What is otherwise in another explanation; printed, it is a table.

    Attributes:
        names: What each explanation is: policy, device and dtype.
        totals: By the field of ``totals.Totals`` that differs, both values.
        nodes: The ops that are treated otherwise.
    """

    names: tuple[str, str]
    totals: dict[str, tuple[Any, Any]]
    nodes: tuple[NodeDifference, ...]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.totals or self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """The same as dictionaries and lists; the fields are the keys."""
        return {
            "names": list(self.names),
            "totals": {key: list(values) for key, values in self.totals.items()},
            "nodes": [
                {key: list(v) if isinstance(v, tuple) else v for key, v in vars(node).items()}
                for node in self.nodes
            ],
        }

    def __str__(self) -> str:
        """The table, as wide as the terminal."""
        from amp_fx.explanation.table import printed

        return printed(_table(self))

    def __repr__(self) -> str:
        """One line."""
        return f"<Diff: {len(self.nodes)} ops and {len(self.totals)} totals differ>"


def compare(ours: Explanation, other: Explanation) -> Diff:
    """What differs; ops are matched by module, op as captured, and order."""
    left, right = _keyed(ours), _keyed(other)
    keys = list(dict.fromkeys([*left, *right]))
    pairs = [(key, *pair) for key in keys for pair in _pair(left.get(key), right.get(key))]
    nodes = [_difference(key, a, b) for key, a, b in pairs]
    totals = {
        field.name: (getattr(ours.totals, field.name), getattr(other.totals, field.name))
        for field in dataclasses.fields(ours.totals)
    }
    return Diff(
        names=(_describe(ours), _describe(other)),
        totals={key: values for key, values in totals.items() if values[0] != values[1]},
        nodes=tuple(n for n in nodes if n.dtypes[0] != n.dtypes[1] or len(set(n.treatments)) > 1),
    )


def _describe(explanation: Explanation) -> str:
    return f"{explanation.policy} {explanation.device_type} {explanation.dtype}"


def _keyed(explanation: Explanation) -> dict[tuple[str, str], list[NodeRecord]]:
    """Nodes by module and the op as a person wrote it: opened nodes are named otherwise."""
    found: dict[tuple[str, str], list[NodeRecord]] = {}
    for node in explanation.nodes:
        if node.kind in ("op", "island"):
            found.setdefault((node.module, bare_op(node.op)), []).append(node)
    return found


def _pair(
    left: list[NodeRecord] | None, right: list[NodeRecord] | None
) -> list[tuple[NodeRecord | None, NodeRecord | None]]:
    return list(zip_longest(left or [], right or []))


def _difference(
    key: tuple[str, str], ours: NodeRecord | None, other: NodeRecord | None
) -> NodeDifference:
    both = (ours, other)
    dtypes = tuple(node.dtype if node else "" for node in both)
    treatments = tuple(treatment(node) if node else "" for node in both)
    return NodeDifference(key[0], key[1], (dtypes[0], dtypes[1]), (treatments[0], treatments[1]))


def _table(diff: Diff) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table

    totals = Table("", *diff.names, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, (a, b) in diff.totals.items():
        totals.add_row(name, _shown(a), _shown(b))
    nodes = Table("module", "op", "x", *diff.names, box=box.SIMPLE_HEAD, pad_edge=False)
    groups: dict[tuple[Any, ...], list[NodeDifference]] = {}
    for node in diff.nodes:
        key = (without_numbers(node.module), node.op, node.dtypes, node.treatments)
        groups.setdefault(key, []).append(node)
    for (_, op, dtypes, treatments), found in groups.items():
        cells = [
            " ".join(filter(None, pair)) or "-" for pair in zip(dtypes, treatments, strict=True)
        ]
        times = str(len(found)) if len(found) > 1 else ""
        nodes.add_row(folded_path(n.module for n in found) or "-", op, times, *cells)
    return Group(totals, nodes) if diff else "no difference"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_shown(v)}" for k, v in value.items()) or "-"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
