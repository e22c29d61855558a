"""A report as what ``amp_fx.draw`` takes: a graph of ops, and how strongly each is coloured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from amp_fx.explanation.explanation import Explanation
from amp_fx.explanation.records import GraphRecord, NodeRecord, TensorRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.numerics.records import OpRecord
    from amp_fx.numerics.report import AccuracyReport

MEASURES = ("effect", "error", "headroom")
"""What boxes can be coloured by."""

LEVELS = 5
"""How many strengths of colour there are; 0 is none."""


def as_explanation(report: AccuracyReport) -> Explanation:
    """The ops of a report as a graph of the forward, and one of the backward."""
    graphs = []
    for index, stage in enumerate(("forward", "backward")):
        nodes = [node for node in report.nodes if node.stage == stage]
        if nodes:
            names = {node.index: node.name for node in nodes}
            graphs.append(
                GraphRecord(
                    index=index,
                    stage=stage,
                    autocast=(f"{report.device_type} {report.dtype}",),
                    nodes=tuple(_record(node, names, report) for node in nodes),
                    modules=tuple({n.module: n.module_type for n in nodes}.items()),
                )
            )
    return Explanation(report.model, "", report.dtype, report.device_type, False, tuple(graphs))


def _record(node: OpRecord, names: dict[int, str], report: AccuracyReport) -> NodeRecord:
    label = node.kernel.replace("::", ".")
    is_cast = node.kernel == "aten::_to_copy"
    return NodeRecord(
        name=node.name,
        kind="op",
        op=f"cast for {node.label}" if is_cast else label,
        module=node.module,
        module_type=node.module_type,
        file=node.file,
        line=node.line,
        code=node.code,
        dtype=node.dtype,
        inputs=tuple(names[i] for i in node.inputs if i in names),
        outputs=(TensorRecord(node.dtype, node.shape, report.device_type, 0),),
        decisions=(),
        origin="",
        reason=node.reason,
        flops=0,
    )


def levels_of(report: AccuracyReport, measure: str) -> dict[str, int]:
    """How strongly each op is coloured, from 0 to ``LEVELS``, by name.

    Args:
        report: The report.
        measure: ``"effect"``: its part of the largest effect on the loss; ``"error"``: the
            accumulated error, from a hundredth of one rounding of bfloat16 to all of the result;
            ``"headroom"``: how near the largest value comes to the dtype's limit.
    """
    largest = max((node.effect_rms for node in report.nodes), default=0.0)
    strength: dict[str, Callable[[OpRecord], float]] = {
        "effect": lambda n: _decades(n.effect_rms, largest),
        "error": lambda n: _decades(n.accumulated, 1.0),
        "headroom": lambda n: 0.0 if math.isinf(n.headroom) else 1 - n.headroom / 20,
    }
    chosen = strength[measure]
    return {node.name: _level(chosen(node)) for node in report.nodes}


def _decades(value: float, largest: float) -> float:
    """1 for the largest, 0 for what is ten thousand times smaller."""
    if not value or not largest or math.isnan(value):
        return 0.0
    return 1.0 if math.isinf(value) else 1 + math.log10(value / largest) / 4


def _level(strength: float) -> int:
    return min(LEVELS, max(0, math.ceil(strength * LEVELS)))


def origins_of(report: AccuracyReport) -> frozenset[str]:
    """The ops in which something overflows."""
    return frozenset(node.name for node in report.nodes if node.is_overflow)
