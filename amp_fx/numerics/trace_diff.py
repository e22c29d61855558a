"""Compares two traces: the first difference, ops that amplify it, and differences by rounding."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import TYPE_CHECKING

from amp_fx.numerics.equality import Difference, compare, relative_error
from amp_fx.numerics.records import UNIT, grouped, number
from amp_fx.observe.ops import MOVES
from amp_fx.reports import Report, dtype_cell, new_table, stacked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from rich.console import RenderableType


MOST = 12
"""The largest number of rows of the table."""
ROUNDINGS = 8.0
"""The largest error of an op by rounding, relative to that of its inputs or to one rounding."""


@dataclasses.dataclass(frozen=True)
class TracedOp:
    """One result of an op that ran.

    Attributes:
        stage: ``"forward"``, ``"backward"``, ``"update"``, or ``"result"`` for an output or a
            gradient.
        module: The path of the innermost module; in the backward, that of the forward.
        op: The name of the op (``"addmm"``), or of the output or gradient.
        source: The line in the program: ``"model.py:12: y = x @ w"``; empty if unknown.
        dtype: The dtype of the result.
        shape: The sizes of the result.
        inputs: The numbers of the ops that made its inputs.
        digest: A hash of all bytes of the result.
        values: A sample of the elements, in one dimension.
    """

    stage: str
    module: str
    op: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    inputs: tuple[int, ...]
    digest: str
    values: torch.Tensor


@dataclasses.dataclass(frozen=True)
class OpDifference:
    """An op whose results in two traces differ.

    Attributes:
        stage: ``"forward"``, ``"backward"`` or ``"result"``.
        module: The path of the module.
        op: The name of the op.
        source: The line in the program: ``"model.py:12: y = x @ w"``.
        dtypes: The dtype of the result in each trace.
        difference: The difference of the results.
        error: The relative difference (L2) of the samples of the results.
        error_in: The largest relative difference of the inputs.
    """

    stage: str
    module: str
    op: str
    source: str
    dtypes: tuple[str, str]
    difference: Difference
    error: float
    error_in: float

    @property
    def amplification(self) -> float:
        """The ratio of the difference to that of the inputs, or to one rounding."""
        unit = max(UNIT.get(dtype, UNIT["float32"]) for dtype in self.dtypes)
        return self.error / max(self.error_in, unit)

    @property
    def is_rounding(self) -> bool:
        """True if the op has one dtype, and differs by rounding or because its inputs differ.

        True for outputs and gradients of the program, whose inputs are unknown.
        """
        is_same_dtype = self.dtypes[0] == self.dtypes[1]
        return is_same_dtype and (self.stage == "result" or self.amplification <= ROUNDINGS)

    def __str__(self) -> str:
        """Returns one line."""
        where = f" in {self.module}" if self.module else ""
        stage = "the backward of " if self.stage == "backward" else ""
        source = f" ({self.source})" if self.source else ""
        return f"{stage}{self.op}{where}{source}; {self.difference}"


def op_differences(
    before: Sequence[TracedOp], after: Sequence[TracedOp], pairs: dict[int, int]
) -> Iterator[OpDifference]:
    """Yields the ops that differ, in the order of the first trace.

    The first one is named by an op that the second trace has before it and the first one lacks, if
    there is such an op.

    Args:
        before: The first trace.
        after: The other one.
        pairs: The indices of ops that both traces have.
    """
    known, errors = set(pairs.values()), list[float]()
    for index, one in enumerate(before):
        error_in = max((errors[i] for i in one.inputs), default=0.0)
        errors.append(error_in)
        if index not in pairs:
            continue
        other = after[pairs[index]]
        found = _difference(one, other)
        if found is None:
            errors[-1] = 0.0
            continue
        errors[-1] = relative_error([(one.values, other.values)])
        at = one if any(errors[:-1]) else _added(after, other, known) or one
        place, dtypes = (at.stage, at.module, at.op, at.source), (one.dtype, other.dtype)
        yield OpDifference(*place, dtypes, found, errors[-1], error_in)


def _difference(one: TracedOp, other: TracedOp) -> Difference | None:
    found = compare(one.op, one.values, other.values)
    if found is None and one.digest != other.digest:
        note = "elements differ that are not in the sample"
        return Difference(one.op, 0, math.prod(one.shape), math.nan, None, note)
    return found


def _added(trace: Sequence[TracedOp], op: TracedOp, known: set[int]) -> TracedOp | None:
    """Returns the first op before an op that another trace lacks, and that may round."""
    for index in op.inputs:
        if index not in known:
            above = trace[index]
            is_cast = above.op == "to_copy" and above.values.itemsize >= op.values.itemsize
            is_exact = is_cast or f"aten::{above.op}" in MOVES
            found = _added(trace, above, known) or (None if is_exact else above)
            if found is not None:
                return found
    return None


def aligned(before: Sequence[TracedOp], after: Sequence[TracedOp]) -> dict[int, int]:
    """Returns the indices of ops that two traces have in common.

    The longest common sequences of ops are aligned in each module; the order of modules may differ.
    """
    ours, theirs = (
        grouped(enumerate(trace), lambda item: (item[1].stage, item[1].module))
        for trace in (before, after)
    )
    pairs = {}
    for place in ours.keys() & theirs.keys():
        left, right = ours[place], theirs[place]
        one, other = ([(op.op, op.shape) for _, op in items] for items in (left, right))
        matcher = difflib.SequenceMatcher(None, one, other, False)
        for block in matcher.get_matching_blocks():
            for i in range(block.size):
                pairs[left[block.a + i][0]] = right[block.b + i][0]
    return pairs


@dataclasses.dataclass(frozen=True, repr=False)
class TraceDiff(Report):
    """The differences between two traces.

    Attributes:
        before: The name of the first trace.
        after: The name of the second trace.
        num_aligned: The number of results in both traces.
        only_before: The number of results only in the first trace.
        only_after: The number of results only in the second trace.
        ops: The results that differ, in order.
    """

    computed = ("first", "amplifiers")

    before: str
    after: str
    num_aligned: int
    only_before: int
    only_after: int
    ops: tuple[OpDifference, ...]

    @property
    def first(self) -> OpDifference | None:
        """The first difference; None without differences."""
        return self.ops[0] if self.ops else None

    @property
    def amplifiers(self) -> tuple[OpDifference, ...]:
        """The ops that differ by more than rounding, the largest amplification first."""
        found = [op for op in self.ops if not op.is_rounding]
        return tuple(sorted(found, key=lambda op: -op.amplification))

    def _render(self) -> RenderableType:
        from rich.text import Text

        counts = (
            f"{self.num_aligned} results are in both, {len(self.ops)} of them differ, "
            f"{sum(op.is_rounding for op in self.ops)} by rounding alone; {self.only_before} are "
            f"in the first one only, {self.only_after} in the second one only"
        )
        lines = [f"before: {self.before}", f"after:  {self.after}", counts]
        lines += [f"first: {self.first}"] if self.first else []
        results = sorted((op for op in self.ops if op.stage == "result"), key=lambda op: -op.error)
        shown = [*self.amplifiers[:MOST], *results[: MOST // 2]]
        if not shown:
            return stacked(*lines)
        rows = [
            (
                op.stage,
                op.module or "-",
                op.op,
                Text("/").join([dtype_cell(dtype) for dtype in dict.fromkeys(op.dtypes)]),
                number(op.error_in) if op.stage != "result" else "",
                number(op.error),
                number(op.amplification) if op.stage != "result" else "",
                op.source,
            )
            for op in shown
        ]
        folded = ("stage", "module", "op", "source")
        names = (*folded[:3], "dtype", "input error", "error", "ratio", "source")
        return stacked(*lines, "", new_table(*names, rows=rows, folded=folded))

    def __repr__(self) -> str:
        """Returns one line."""
        return f"<TraceDiff: {len(self.ops)} of {self.num_aligned} results differ>"
