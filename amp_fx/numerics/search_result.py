"""The result of ``amp_fx.search``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from amp_fx.numerics.records import number
from amp_fx.reports import Report, new_table, stacked

if TYPE_CHECKING:
    from rich.console import RenderableType

    from amp_fx.numerics.report import AccuracyReport
    from amp_fx.policies.policy import Policy


@dataclasses.dataclass(frozen=True)
class Unit:
    """A candidate: an op of one module, or of repeated modules.

    Attributes:
        module: A pattern for the paths of the modules: ``"h.*.attn"``; ``"*"`` for the outermost.
            Paths begin at a root module.
        op: The name of the op in a policy.
        why: The reason.
        kind: The kind of the suspect in the report of ``amp_fx.accuracy``; empty if it is none.
    """

    module: str
    op: str
    why: str = dataclasses.field(compare=False)
    kind: str = dataclasses.field(compare=False)

    def __str__(self) -> str:
        """Returns a short text: ``h.*.attn: matmul``."""
        return f"{self.module}: {self.op}"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One run under a policy.

    Attributes:
        units: The candidates in float32, or in the low dtype instead of float8.
        value: The metric.
        is_enough: True if the metric is within the tolerance.
    """

    units: tuple[str, ...]
    value: float
    is_enough: bool


@dataclasses.dataclass(frozen=True, repr=False)
class SearchResult(Report):
    """A policy that meets a tolerance, and the runs that found it.

    Attributes:
        model: The name of the step.
        dtype: The low dtype.
        policy: The policy.
        units: The candidates that run in ``runs_in``, in order of the ranking.
        num_units: The number of candidates.
        tolerance: The largest accepted value of the metric.
        value: The metric under the policy; the graphs run op by op.
        before: The metric under the policy at the start.
        is_minimal: True if a run without each candidate showed that none can be omitted.
        history: The runs, in order.
        notes: Other remarks.
        report: The report that ranked the candidates.
        runs_in: ``"float32"``; the low dtype if the policy at the start has products in float8.
    """

    computed, omitted = ("evaluations",), ("report", "policy")

    model: str
    dtype: str
    policy: Policy
    units: tuple[Unit, ...]
    num_units: int
    tolerance: float
    value: float
    before: float
    is_minimal: bool
    history: tuple[Evaluation, ...]
    notes: tuple[str, ...]
    report: AccuracyReport
    runs_in: str = "float32"

    @property
    def evaluations(self) -> int:
        """The number of runs under policies."""
        return len(self.history)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result without the report, with the text of the policy."""
        return {**super().to_dict(), "policy": str(self.policy)}

    def _render(self) -> RenderableType:
        head = (
            f"{self.model} in {self.dtype}: {len(self.units)} of {self.num_units} in "
            f"{self.runs_in}, {number(self.before)} -> {number(self.value)} "
            f"(tolerance {self.tolerance:g}), {self.evaluations} runs"
        )
        verdict = "none can be left out" if self.is_minimal else "not shown to be minimal"
        lines = [head, verdict, *self.notes]
        if not self.units:
            return stacked(*lines)
        names = ("module", "op", "why")
        rows = [(unit.module, unit.op, unit.why) for unit in self.units]
        return stacked(*lines, "", new_table(*names, rows=rows, folded=names))
