"""Finds the ops of a report that cause harm: thresholds, groups and their order.

No single measure is enough: overflows, the op's own error, and its amplification of errors find ops
that destroy their results. The first-order effect on the loss says which op upstream caused it, as
long as errors are small. Elements that are small in norm, such as a probability that becomes zero,
are harmless and not reported.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import TYPE_CHECKING

import torch

from amp_fx.explanation.table import without_numbers
from amp_fx.numerics.records import (
    UNIT,
    OpRecord,
    Suspect,
    flush_words,
    grouped,
    number,
    overflow_words,
    share,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOPS = 4
"""The number of ops upstream in which the cause of an overflow or a cancellation may be."""
FEW_FLIPS = 0.05
"""The share of discrete elements that may differ because two values were close."""


class OpGraph:
    """The ops of a report, with edges from the ops that made their inputs."""

    def __init__(self, nodes: Sequence[OpRecord]) -> None:
        self.nodes = nodes
        self._by_index = {node.index: node for node in nodes}

    def upstream(self, node: OpRecord, *, is_inside: bool = False) -> list[OpRecord]:
        """Returns the ops upstream of an op, the nearest first.

        Args:
            node: The op.
            is_inside: True for all ops of the same module; else at most ``HOPS`` edges.
        """
        found: dict[int, OpRecord] = {}
        level = [node]
        for _ in range(len(self.nodes) if is_inside else HOPS):
            above = {n.index: n for below in level for n in reversed(self.inputs(below))}
            level = [n for index, n in above.items() if index not in found]
            if is_inside:
                level = [n for n in level if n.module == node.module]
            if not level:
                break
            found |= {n.index: n for n in level}
        return list(found.values())

    def source(self, node: OpRecord) -> OpRecord:
        """Returns the op of the forward whose error matters most, upstream of an op.

        It is in the module of the op if an op there rounds, else at most ``HOPS`` edges away. If
        nothing upstream rounds, it is the op itself.
        """
        inside, near = self.upstream(node, is_inside=True), self.upstream(node)
        for above in (inside, [node], near):
            rounding = [n for n in above if n.local > 0 and n.stage == "forward"]
            if rounding:
                return max(rounding, key=lambda n: n.effect_rms)
        return node

    @functools.cached_property
    def chosen(self) -> frozenset[int]:
        """The ops of the forward downstream of a choice that differs in few elements.

        If two values are close, chance decides which is larger: one token goes to another expert,
        and all others move if tokens are sorted by expert. The errors of the moved elements are
        large and harmless. The share of elements that differ in the first discrete result counts.
        """
        shares: dict[int, float] = {}
        found = set()
        for node in self._forward():
            above = max((shares.get(n.index, 0.0) for n in self.inputs(node)), default=0.0)
            if 0 < above < FEW_FLIPS:
                found.add(node.index)
            if node.flips:
                numel = max(1, math.prod(node.shape))
                shares[node.index] = above or node.flips / numel
        return frozenset(found)

    @functools.cached_property
    def entered(self) -> dict[int, float]:
        """The largest error of the inputs of the module, for each op of the forward."""
        found: dict[int, float] = {}
        for node in self._forward():
            errors = [node.accumulated if node.index in self.chosen else 0.0]
            for index in node.inputs:
                above = self._by_index.get(index)
                if above is None:  # not measured
                    errors.append(node.accumulated_in)
                elif above.module == node.module:
                    errors.append(found.get(index, above.accumulated))
                else:
                    errors.append(above.accumulated)
            found[node.index] = max(errors)
        return found

    def _forward(self) -> list[OpRecord]:
        return [node for node in self.nodes if node.stage == "forward"]

    def inputs(self, node: OpRecord) -> list[OpRecord]:
        """Returns the measured ops that made the inputs of an op."""
        return [self._by_index[i] for i in node.inputs if i in self._by_index]


def weight_of(nodes: Sequence[OpRecord]) -> float:
    """Returns the effect of ops on the loss: the sum, or that with random signs if it is larger."""
    signed = abs(sum(n.effect or 0.0 for n in nodes))
    return max(signed, math.hypot(*(n.effect_rms for n in nodes)))


LOCAL_UNITS = 8.0
"""The largest harmless error of an op itself, in roundings; a sound kernel has about half."""
GROWTH = 20.0
"""The growth of errors in one module from which its ops are suspects, ..."""
GROWN = 0.05
"""... if the relative error of a result is at least this large."""
LEAST_ELEMENTS = 8
"""Errors of results with fewer elements depend on chance."""
LOST_GRADIENT = 0.5
"""The largest harmless share of a gradient's norm that is flushed to zero."""
WRONG_GRADIENT, AMPLIFIED_GRADIENT = 0.2, 5.0
"""The relative error of all gradients from which the backward has a suspect, if the forward has
none, and the amplification of that op. Sound models have a relative error of at most 0.04."""


def find_suspects(
    nodes: Sequence[OpRecord], *, room: float = 1.0, gradient_error: float = 0.0
) -> tuple[Suspect, ...]:
    """Returns the ops that cause harm: overflows in order of time, then others by their scores.

    The forward comes before the backward.

    Args:
        nodes: The ops of a report.
        room: The factor by which the scale of the loss may grow. Gradients that a larger scale
            preserves are no fault of the op.
        gradient_error: The relative error of all gradients.
    """
    graph = OpGraph(nodes)
    found = [suspect for node in nodes for suspect in _suspects(node, graph, room)]
    blamed = {suspect.module for suspect in found if suspect.stage == "forward"}
    found += _growths(graph, blamed)
    if not found and gradient_error >= WRONG_GRADIENT:
        found += _wrong_gradients(graph, gradient_error)
    alike = grouped(found, lambda s: (s.kind, s.stage, without_numbers(s.module), s.op, s.dtype))
    ranked = sorted(map(_merged, alike.values()), key=_rank)
    same_op = grouped(ranked, lambda s: (s.stage, s.module, s.op))
    return tuple(first for first, *_ in same_op.values())


def _rank(suspect: Suspect) -> tuple[float, float]:
    if suspect.kind == "overflow":
        return (0 if suspect.stage == "forward" else 2), suspect.members[0]
    return (1 if suspect.stage == "forward" else 3), -suspect.score


def _suspects(node: OpRecord, graph: OpGraph, room: float) -> Iterator[Suspect]:
    if node.dtype not in UNIT:
        return
    if node.is_overflow or (node.fills and any(n.poisoned for n in graph.nodes)):
        if node.singular:
            yield _singularity(node, graph)
        else:
            yield _suspect("overflow", node, float(node.overflows), overflow_words(node))
    if node.stage == "forward":
        yield from _forward_suspects(node)
    elif node.local >= LOST_GRADIENT:
        yield from _gradient_suspects(node, room)


def _gradient_suspects(node: OpRecord, room: float) -> Iterator[Suspect]:
    lost, score = f"{share(min(node.local, 1))} of the gradient's norm", node.local / LOST_GRADIENT
    smallest = torch.finfo(getattr(torch, node.dtype)).smallest_normal
    if node.underflow >= LOST_GRADIENT / 2 and node.max_abs * room < smallest:
        yield _suspect("underflow", node, score, f"{flush_words(node)}, {lost}")


def _forward_suspects(node: OpRecord) -> Iterator[Suspect]:
    units = node.local / UNIT[node.dtype]
    if units > LOCAL_UNITS and not node.overflows:
        kind = "underflow" if node.underflow > 0.001 else "local error"
        why = f"its own error is {number(node.local)}, {units:.0f} roundings"
        why += f"; {flush_words(node)}" if node.underflow else ""
        yield _suspect(kind, node, units / LOCAL_UNITS, why)


def _is_telling(node: OpRecord) -> bool:
    """Returns True if an error is finite, and has too many elements to depend on chance."""
    return node.numel >= LEAST_ELEMENTS and math.isfinite(node.accumulated)


def _singularity(node: OpRecord, graph: OpGraph) -> Suspect:
    """Blames the op whose rounding reached zero."""
    why = f"{node.singular} of {node.numel} elements become infinite or NaN"
    above = [n for n in graph.upstream(node) if n.stage == node.stage and n.dtype in UNIT]
    inside = [n for n in above if n.module == node.module] or above
    most = max((n.underflow for n in inside), default=0.0)
    flushed = [n for n in inside if n.flushed and n.underflow >= most / 4]
    # The first flush causes later ones.
    rounded = [n for n in inside if n.local > 0]
    worst = max(rounded, key=lambda n: n.effect_rms, default=node)
    cause = flushed[-1] if flushed else worst
    if cause is not node:
        told = flush_words(cause) if cause.flushed else f"it rounds by {number(cause.local)}"
        why = f"{told}, and in `{node.label}` after it {why}"
    return _suspect("overflow", cause, float(node.singular), why)


def _growths(graph: OpGraph, blamed: set[str]) -> Iterator[Suspect]:
    """Yields modules in which errors grow, in one op or over several."""
    unit = max((UNIT[n.dtype] for n in graph.nodes if n.dtype in UNIT), default=0.0)
    worst: dict[str, tuple[float, OpRecord]] = {}
    for node in graph.nodes:
        if node.index not in graph.entered or node.dtype not in UNIT or node.module in blamed:
            continue
        growth = node.accumulated / max(graph.entered[node.index], unit)
        is_large = growth >= GROWTH and node.accumulated >= GROWN and _is_telling(node)
        if is_large and growth > worst.get(node.module, (0.0, node))[0]:
            worst[node.module] = growth, node
    for growth, node in worst.values():
        yield _growth(node, growth, graph)


def _growth(node: OpRecord, growth: float, graph: OpGraph) -> Suspect:
    cause = graph.source(node)
    why = f"errors grow {growth:.0f} times in the module, to {number(node.accumulated)}"
    why += f" in `{node.label}`" if node.label != cause.label else ""
    return _suspect("growth", cause, growth / GROWTH, why)


def _wrong_gradients(graph: OpGraph, gradient_error: float) -> Iterator[Suspect]:
    """Yields the op whose backward amplifies errors to the largest one."""
    backward = [n for n in graph.nodes if n.stage == "backward" and _is_telling(n)]
    kept = [n for n in backward if n.underflow < LOST_GRADIENT / 2]
    found = [n for n in kept if n.amplification >= AMPLIFIED_GRADIENT]
    if not found:
        return
    worst = max(found, key=lambda n: n.accumulated * n.norm)
    saved = [n for n in graph.inputs(worst) if n.stage == "forward"]
    why = f"the gradients are off by {share(gradient_error)}: in the backward of `{worst.label}` "
    why += f"errors grow {worst.amplification:.0f} times, to {number(worst.accumulated)}"
    source = max(saved, key=lambda n: n.accumulated, default=worst)
    cause = graph.source(source)
    yield _suspect("growth", cause, gradient_error / WRONG_GRADIENT, why)


def _suspect(kind: str, op: OpRecord, score: float, why: str) -> Suspect:
    """Returns the suspect for one op.

    Args:
        kind: The kind of the suspect.
        op: The op to run in float32.
        score: The ratio of the measure to its threshold.
        why: The reason, in one sentence.
    """
    return Suspect(
        kind=kind,
        module=op.module,
        op=op.label,
        stage=op.stage,
        dtype=op.dtype,
        file=op.file,
        line=op.line,
        code=op.code,
        why=why,
        score=score,
        members=(op.index,),
        is_mendable=bool(op.op),
    )


def _merged(group: list[Suspect]) -> Suspect:
    """Returns one suspect for ops that are alike."""
    worst = group[0] if group[0].kind == "overflow" else max(group, key=lambda s: s.score)
    modules = list(dict.fromkeys(suspect.module for suspect in group))
    more = f" (and in {len(modules) - 1} modules like it)" if len(modules) > 1 else ""
    members = dict.fromkeys(member for suspect in group for member in suspect.members)
    return dataclasses.replace(
        worst, module=common_pattern(modules), why=worst.why + more, members=tuple(members)
    )


def common_pattern(paths: Sequence[str]) -> str:
    """Returns one pattern for paths that only differ in numbers: ``h.*.attn``."""
    columns = zip(*(re.split(r"(\d+)", path) for path in paths), strict=True)
    return "".join(column[0] if len({*column}) == 1 else "*" for column in columns)
