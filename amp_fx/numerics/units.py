"""What a search may put into float32: an op of a module, alike modules together, ranked."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from amp_fx.explanation.rows import without_numbers
from amp_fx.numerics.places import is_inside
from amp_fx.numerics.suspects import common_pattern
from amp_fx.numerics.words import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amp_fx.numerics.records import OpRecord
    from amp_fx.numerics.report import AccuracyReport


@dataclasses.dataclass(frozen=True)
class Unit:
    """An op inside of alike modules.

    Attributes:
        module: A pattern for their paths: ``"h.*.attn"``; ``"*"`` for the outermost one.
        op: What a policy calls it.
        why: What the report has on it.
        order: The number of the first of its ops.
    """

    module: str
    op: str
    why: str = dataclasses.field(compare=False)
    order: int = dataclasses.field(compare=False)

    def __str__(self) -> str:
        """``h.*.attn: matmul``."""
        return f"{self.module}: {self.op}"


def units_of(report: AccuracyReport, keep: Sequence[str]) -> tuple[list[Unit], int]:
    """All units, the most promising first, and how many of these are suspects.

    Overflows come first, by time, then the other suspects; what is left is ranked by what its
    errors do to the loss, whatever their signs.
    """
    groups = _groups(report)
    suspects = [s for s in report.suspects if s.is_mendable]
    reasons = {(without_numbers(s.module.replace("*", "0")), s.op): s.why for s in suspects}
    order = {key: place for place, key in enumerate(reasons)}
    kept = {key: nodes for key, nodes in groups.items() if not _is_kept(nodes, keep)}
    ranked = sorted(kept, key=lambda key: (order.get(key, len(order)), -_weight(kept[key])))
    units = [_unit(kept[key], reasons.get(key, "")) for key in ranked]
    return units, sum(key in reasons for key in ranked)


def _groups(report: AccuracyReport) -> dict[tuple[str, str], list[OpRecord]]:
    groups: dict[tuple[str, str], list[OpRecord]] = {}
    for node in report.nodes:
        if node.stage == "forward" and node.op and node.dtype in ("float16", "bfloat16"):
            groups.setdefault((without_numbers(node.module), node.op), []).append(node)
    return groups


def faults_of(report: AccuracyReport, units: Sequence[Unit]) -> list[Unit]:
    """The units in which something of the forward overflows, the earliest first."""
    overflows = [s for s in report.suspects if s.kind == "overflow" and s.stage == "forward"]
    members = {index for suspect in overflows for index in suspect.members}
    keys = {(without_numbers(n.module), n.op) for n in report.nodes if n.index in members}
    by_order = {unit.order: unit for unit in units}
    found = [by_order.get(nodes[0].index) for key, nodes in _groups(report).items() if key in keys]
    return sorted((u for u in found if u is not None), key=lambda u: u.order)


def _is_kept(nodes: Iterable[OpRecord], keep: Sequence[str]) -> bool:
    return any(is_inside(path, keep) for path in {node.module for node in nodes})


def _weight(nodes: Iterable[OpRecord]) -> float:
    several = list(nodes)
    signed = abs(sum(n.effect or 0.0 for n in several))
    return max(signed, math.hypot(*(n.effect_rms for n in several)))


def _unit(nodes: list[OpRecord], why: str) -> Unit:
    modules = list(dict.fromkeys(node.module for node in nodes))
    worst = max(nodes, key=lambda n: n.local)
    return Unit(
        module=common_pattern(modules) or "*",
        op=nodes[0].op,
        why=why or f"its own error is {number(worst.local)}",
        order=nodes[0].index,
    )
