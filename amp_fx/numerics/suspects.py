"""Finds the ops of a report that cause harm: thresholds, groups and their order.

No single measure is enough. As long as errors are small, the first-order effect on the loss is. If
an op destroys its result, that effect says nothing; overflows, the op's own error and its
amplification of errors find such ops. Elements that are small in norm, such as a probability that
becomes zero, are harmless and not reported.
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
    from collections.abc import Iterable, Iterator, Sequence

    from amp_fx.policies.policy import Policy

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

    def maker_of_error(self, node: OpRecord) -> OpRecord:
        """Follows the largest input error upstream to the op that introduced it.

        Indices and masks propagate errors although they have none themselves.
        """
        seen = {node.index}
        while node.local < node.accumulated / 2 or not node.is_float:
            above = [n for n in self.inputs(node) if n.index not in seen]
            above = [n for n in above if n.accumulated or not n.is_float]
            if not above:
                break
            node = max(above, key=lambda n: n.accumulated)
            seen.add(node.index)
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
FLOAT8_UNITS = 2.0
"""The same for a product in float8, whose roundings are 16 or 32 times as large."""
AMPLIFICATION = 30.0
"""The amplification of an error from which an op is a suspect, ..."""
CANCELLED = 0.03
"""... if its relative error is at least this large."""
GROWTH = 20.0
"""The growth of errors over several ops of one module from which these are suspects, ..."""
GROWN = 0.05
"""... if the relative error of a result is at least this large."""
LEAST_ELEMENTS = 8
"""Errors of results with fewer elements depend on chance."""
EFFECT_UNITS, LEAST_EFFECT = 1.5, 0.002
"""The largest harmless change of the loss by equal ops of one module, relative to the loss: in
roundings, and its lower bound."""
MANY = 64
"""The number of ops from which a quarter is enough: so many errors have a common sign."""
LOST_GRADIENT = 0.5
"""The largest harmless share of a gradient's norm that is flushed to zero."""
WRONG_GRADIENT, AMPLIFIED_GRADIENT = 0.2, 5.0
"""The relative error of all gradients from which the backward has a suspect, if the forward has
none, and the amplification of that op. Sound models have a relative error of at most 0.04."""
PASSED_ON = 4.0
"""An op that amplifies errors more than this propagates the rounding of another op."""

LOW = "lower_precision_fp"
"""The treatment of products for which float8 is too imprecise."""
_DIVISIONS = ("div", "reciprocal", "rsqrt", "log", "log2", "log10", "pow", "true_divide", "digamma")
_DIFFERENCES = ("add", "sub", "rsub", "add_", "sub_")


@dataclasses.dataclass(frozen=True)
class _Finding:
    """One op above a threshold.

    Attributes:
        kind: The kind of the suspect.
        at: The op that is above the threshold.
        mend: The op to run in float32.
        score: The ratio of the measure to its threshold.
        why: The reason, in one sentence.
    """

    kind: str
    at: OpRecord
    mend: OpRecord
    score: float
    why: str


def find_suspects(
    nodes: Sequence[OpRecord], loss: float | None, *, room: float = 1.0, gradient_error: float = 0.0
) -> tuple[Suspect, ...]:
    """Returns the ops that cause harm: overflows in order of time, then others by their scores.

    The forward comes before the backward.

    Args:
        nodes: The ops of a report.
        loss: The size of the loss; None if effects are unknown.
        room: The factor by which the scale of the loss may grow. Gradients that a larger scale
            preserves are no fault of the op.
        gradient_error: The relative error of all gradients.
    """
    graph = OpGraph(nodes)
    findings = [f for node in nodes for f in _findings(node, graph, room)]
    blamed = {f.mend.module for f in findings if f.at.stage == "forward"}
    findings += _growths(graph, blamed)
    if loss is not None and math.isfinite(loss) and loss != 0:
        findings += _effects(nodes, loss)
    if not findings and gradient_error >= WRONG_GRADIENT:
        findings += _wrong_gradients(graph, gradient_error)
    groups = grouped(findings, _alike).values()
    suspects = sorted(map(_suspect, groups), key=_rank)
    return tuple(_without_repetitions(suspects))


def _rank(suspect: Suspect) -> tuple[float, float]:
    if suspect.kind == "overflow":
        return (0 if suspect.stage == "forward" else 2), suspect.members[0]
    if suspect.kind == "integers":  # the cause of a later cancellation
        return 0.5, -suspect.score
    return (1 if suspect.stage == "forward" else 3), -suspect.score


def _findings(node: OpRecord, graph: OpGraph, room: float) -> Iterator[_Finding]:
    if node.dtype not in UNIT:
        return
    if node.is_overflow or (node.fills and any(n.poisoned for n in graph.nodes)):
        yield _overflow(node, graph)
    if node.stage == "forward":
        yield from _forward_findings(node, graph)
    elif node.local >= LOST_GRADIENT:
        yield from _gradient_findings(node, room)


def _gradient_findings(node: OpRecord, room: float) -> Iterator[_Finding]:
    lost, score = f"{share(min(node.local, 1))} of the gradient's norm", node.local / LOST_GRADIENT
    if node.underflow < LOST_GRADIENT / 2:
        if node.recipe:
            yield _Finding("local error", node, node, score, f"its own error is {lost}")
        return
    smallest = torch.finfo(getattr(torch, node.dtype)).smallest_normal
    if node.recipe or node.max_abs * room < smallest:
        yield _Finding("underflow", node, node, score, f"{flush_words(node)}, {lost}")


def _forward_findings(node: OpRecord, graph: OpGraph) -> Iterator[_Finding]:
    units = node.local / UNIT[node.dtype]
    most = FLOAT8_UNITS if node.recipe else LOCAL_UNITS
    if units > most and not node.overflows:
        kind = "underflow" if node.underflow > 0.001 else "local error"
        why = f"its own error is {number(node.local)}, {units:.0f} roundings"
        why += f"; {flush_words(node)}" if node.underflow else ""
        yield _Finding(kind, node, node, units / most, why)
    if node.integers:
        exact = round(1 / UNIT[node.dtype])
        why = f"its inputs are rounded integers up to {node.integers:.0f}: "
        why += f"{node.dtype} represents all integers up to {exact}, but not above"
        yield _Finding("integers", node, node, node.integers / exact, why)
    is_large = node.amplification >= AMPLIFICATION and node.accumulated >= CANCELLED
    if is_large and _is_telling(node) and node.index not in graph.chosen:
        yield _cancellation(node, graph)


def _is_telling(node: OpRecord) -> bool:
    """Returns True if an error is finite, and has too many elements to depend on chance."""
    return node.numel >= LEAST_ELEMENTS and math.isfinite(node.accumulated)


def _overflow(node: OpRecord, graph: OpGraph) -> _Finding:
    if node.singular:
        return _singularity(node, graph)
    why = overflow_words(node)
    if node.kernel.removeprefix("aten::").rstrip("_") not in _DIVISIONS:
        return _Finding("overflow", node, node, float(node.overflows), why)
    above = [n for n in graph.upstream(node) if n.flushed and n.stage == node.stage]
    if not above:
        return _Finding("overflow", node, node, float(node.overflows), why)
    cause = above[0]
    why = f"{flush_words(cause)}, and `{node.label}` after it overflows: {why}"
    return _Finding("overflow", node, cause, float(node.overflows), why)


def _singularity(node: OpRecord, graph: OpGraph) -> _Finding:
    """Blames the op whose rounding reached zero, or else the op that becomes infinite."""
    why = f"{node.singular} of {node.numel} elements become infinite or NaN"
    above = [n for n in graph.upstream(node) if n.stage == node.stage and n.dtype in UNIT]
    inside = [n for n in above if n.module == node.module]
    most = max((n.underflow for n in inside or above), default=0.0)
    flushed = [n for n in inside or above if n.flushed and n.underflow >= most / 4]
    rounded = [n for n in inside or above if n.local > 0 and n.amplification < PASSED_ON]
    # A difference shows the errors of its inputs, and the first flush causes later ones.
    makers = [n for n in rounded if n.kernel.removeprefix("aten::") not in _DIFFERENCES]
    cause = next(iter([*reversed(flushed), *makers, *rounded]), node)
    if cause is not node:
        told = flush_words(cause) if cause.flushed else f"it rounds by {number(cause.local)}"
        why = f"{told}, and in `{node.label}` after it {why}"
    return _Finding("overflow", node, cause, float(node.singular), why)


def _cancellation(node: OpRecord, graph: OpGraph) -> _Finding:
    grew = f"amplifies its error {node.amplification:.0f} times, to {number(node.accumulated)}"
    score = node.amplification / AMPLIFICATION
    above = [n for n in graph.upstream(node) if n.local > 0]
    inside = [n for n in above if n.module == node.module] or above
    if not inside:
        return _Finding("cancellation", node, node, score, grew)
    cause = max(inside, key=lambda n: n.effect_rms)
    cause = cause if cause.effect_rms else graph.maker_of_error(node)
    if cause.label == node.label:
        return _Finding("cancellation", node, cause, score, grew)
    return _Finding("cancellation", node, cause, score, f"`{node.label}` after it {grew}")


def _growths(graph: OpGraph, blamed: set[str]) -> Iterator[_Finding]:
    """Yields modules in which errors grow over several ops, none above a threshold by itself."""
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


def _growth(node: OpRecord, growth: float, graph: OpGraph) -> _Finding:
    """Blames the ops of one name whose errors together change the loss most."""
    above = [node, *graph.upstream(node, is_inside=True)]
    alike = grouped((n for n in above if n.local > 0), lambda n: n.label)
    several = max(alike.values(), key=weight_of, default=[node])
    if not weight_of(several):
        maker = graph.maker_of_error(node)
        several = alike.get(maker.label, [maker])
    cause = max(several, key=lambda n: (abs(n.effect or 0.0), n.local))
    why = f"errors grow {growth:.0f} times in the module, to {number(node.accumulated)}"
    why += f" in `{node.label}`" if node.label != cause.label else ""
    why += f"; {len(several)} such ops round" if len(several) > 1 else ""
    return _Finding("growth", node, cause, growth / GROWTH, why)


def _wrong_gradients(graph: OpGraph, gradient_error: float) -> Iterator[_Finding]:
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
    above = [source, *graph.upstream(source, is_inside=True)]
    rounding = [n for n in above if n.local > 0 and n.stage == "forward"]
    cause = max(rounding, key=lambda n: n.effect_rms, default=worst)
    yield _Finding("growth", worst, cause, gradient_error / WRONG_GRADIENT, why)


def _effects(nodes: Iterable[OpRecord], loss: float) -> Iterator[_Finding]:
    known = (n for n in nodes if n.effect is not None and n.dtype in UNIT and not n.overflows)
    for several in grouped(known, lambda n: (n.module, n.label)).values():
        moved = sum(n.effect or 0.0 for n in several)
        part = abs(moved) / loss
        threshold = max(EFFECT_UNITS * max(UNIT[n.dtype] for n in several), LEAST_EFFECT)
        threshold = threshold / 4 if len(several) >= MANY else threshold
        if part <= threshold or not math.isfinite(part):
            continue
        count = f"{len(several)} such ops together move" if len(several) > 1 else "moves"
        why = f"{count} the loss by {number(moved)}, {share(part)} of it"
        worst = max(several, key=lambda n: abs(n.effect or 0.0))
        yield _Finding("effect", worst, worst, part / threshold, why)


def _alike(found: _Finding) -> tuple[str, ...]:
    """Returns the key of findings that become one suspect."""
    mend = found.mend
    return found.kind, mend.stage, without_numbers(mend.module), mend.label, mend.dtype


def _suspect(group: list[_Finding]) -> Suspect:
    worst = group[0] if group[0].kind == "overflow" else max(group, key=lambda f: f.score)
    mend = worst.mend
    modules = list(dict.fromkeys(f.mend.module for f in group))
    more = f" (and in {len(modules) - 1} modules like it)" if len(modules) > 1 else ""
    return Suspect(
        kind=worst.kind,
        module=common_pattern(modules),
        op=mend.label,
        stage=mend.stage,
        dtype=mend.dtype,
        file=mend.file,
        line=mend.line,
        code=mend.code,
        why=worst.why + more,
        score=worst.score,
        members=tuple(dict.fromkeys(f.mend.index for f in group)),
        is_mendable=bool(mend.op),
        recipe=mend.recipe,
    )


def _without_repetitions(suspects: Iterable[Suspect]) -> Iterator[Suspect]:
    """Yields the first suspect of each op."""
    seen: set[tuple[str, str, str]] = set()
    for suspect in suspects:
        key = (suspect.stage, suspect.module, suspect.op)
        if key not in seen:
            seen.add(key)
            yield suspect


def common_pattern(paths: Sequence[str]) -> str:
    """Returns one pattern for paths that only differ in numbers: ``h.*.attn``."""
    columns = zip(*(re.split(r"(\d+)", path) for path in paths), strict=True)
    return "".join(column[0] if len({*column}) == 1 else "*" for column in columns)


def path_in_root(module: str, roots: Iterable[str]) -> str:
    """Returns the path of a module without the label of its root: patterns begin at the root.

    Args:
        module: A path as it is printed, or a pattern.
        roots: The labels of the roots, if there are several.
    """
    labels = [label for label in roots if module == label or module.startswith(f"{label}.")]
    return module.removeprefix(max(labels, key=len)).removeprefix(".") if labels else module


def with_override(policy: Policy, pattern: str, op: str, treatment: str) -> Policy:
    """Returns a policy with an override for an op of modules.

    Args:
        policy: The policy to start from.
        pattern: A pattern of modules; ``"*"`` for ops outside of any, hence for all of a name.
        op: The op.
        treatment: The treatment of the op.
    """
    if pattern in ("", "*"):
        return policy.with_ops({op: treatment})
    return policy.with_modules({pattern: {op: treatment}})


def policy_of_suspects(
    suspects: Iterable[Suspect], base: Policy, roots: Iterable[str] = ()
) -> Policy:
    """Returns a policy with suspects of the forward in float32, float8 ones in the low dtype.

    Args:
        suspects: The suspects.
        base: The policy to start from.
        roots: The labels of the root modules, if there are several.
    """
    found = [s for s in suspects if (s.stage == "forward" or s.recipe) and s.is_mendable]
    for is_float8, treatment in ((False, "fp32"), (True, LOW)):
        chosen = [s for s in found if bool(s.recipe) is is_float8]
        entries = [(path_in_root(suspect.module, roots), suspect.op) for suspect in chosen]
        for pattern, op in dict.fromkeys(entries):
            base = with_override(base, pattern, op, treatment)
    return base
