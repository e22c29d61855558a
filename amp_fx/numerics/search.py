"""``amp_fx.search``: finds a small set of ops that must run in higher precision.

The report of ``amp_fx.accuracy`` ranks the candidates; ``Minimizer`` finds the set by running the
step under policies. A candidate is an op of repeated modules. If the policy has float8 products,
the candidates are these products, which then run in the low dtype; the set is found for repeated
modules first, then for single ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.errors import AmpFxError, UnsupportedError
from amp_fx.explanation.running import isolated
from amp_fx.explanation.table import without_numbers
from amp_fx.front.compile import compile as compile_program
from amp_fx.numerics.asked import (
    Asked,
    asked_for,
    check_number,
    device_type_of,
    low_dtype_of,
    name_of,
    patterns_of,
    scale_for,
)
from amp_fx.numerics.entry import examine
from amp_fx.numerics.graph_run import CompiledStep
from amp_fx.numerics.measures import relative
from amp_fx.numerics.minimizer import Minimized, Minimizer
from amp_fx.numerics.records import flush_words, grouped, number
from amp_fx.numerics.running import loss_of
from amp_fx.numerics.search_result import Evaluation, SearchResult, Unit
from amp_fx.numerics.suspects import LOW, common_pattern, path_in_root, weight_of, with_override
from amp_fx.observe.places import is_inside
from amp_fx.observe.recorder import Recorder
from amp_fx.observe.step import Step
from amp_fx.options import Options
from amp_fx.progress import working
from amp_fx.second_call import takes_inputs_later

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from amp_fx.numerics.records import OpRecord
    from amp_fx.numerics.report import AccuracyReport
    from amp_fx.observe.step import Outcome
    from amp_fx.policies.policy import Policy


def units_of(report: AccuracyReport, keep: Sequence[str]) -> tuple[list[Unit], int]:
    """Returns all candidates, the most promising first, and the number of suspects among them.

    Suspects are in the order of the report. The other candidates are ranked by the effect of their
    errors on the loss.
    """
    groups = _groups(report)
    suspects = [s for s in report.suspects if s.is_mendable]
    reasons = {(without_numbers(s.module.replace("*", "0")), s.op): s.why for s in suspects}
    order = {key: place for place, key in enumerate(reasons)}
    kept = {
        key: nodes
        for key, nodes in groups.items()
        if not any(is_inside(node.module, keep) for node in nodes)
    }
    ranked = sorted(kept, key=lambda key: (order.get(key, len(order)), -weight_of(kept[key])))
    units = [_unit(kept[key], reasons.get(key, "")) for key in ranked]
    return units, sum(key in reasons for key in ranked)


def with_paths_in_roots(report: AccuracyReport) -> AccuracyReport:
    """Returns a report in which all paths begin at roots, as patterns of a policy do."""
    labels = dict(report.roots)
    nodes = [
        dataclasses.replace(node, module=path_in_root(node.module, labels)) for node in report.nodes
    ]
    return dataclasses.replace(report, nodes=tuple(nodes)) if labels else report


def _with_roots(unit: Unit, report: AccuracyReport) -> Unit:
    """Returns a candidate with the roots that contain its ops, given the report with labels."""
    members = {node.index for node in unit.nodes}
    modules = [node.module for node in report.nodes if node.index in members]
    labels = [label for label, _ in report.roots]
    found = [label for label in labels if any(path_in_root(m, [label]) != m for m in modules)]
    return dataclasses.replace(unit, roots=tuple(found))


def _groups(report: AccuracyReport) -> dict[tuple[str, str], list[OpRecord]]:
    """Groups the low ops of the forward by op and repeated modules."""
    forward = [node for node in report.nodes if node.stage == "forward" and node.op]
    if has_float8(report):
        low = [node for node in forward if node.recipe]
    else:
        low = [node for node in forward if node.dtype in ("float16", "bfloat16")]
    return grouped(low, lambda node: (without_numbers(node.module), node.op))


def has_float8(report: AccuracyReport) -> bool:
    """Returns True if a product of the forward runs in float8."""
    return any(node.recipe for node in report.nodes if node.stage == "forward" and node.op)


def single_units(units: Iterable[Unit]) -> list[Unit]:
    """Splits candidates into one for each module, the one with the largest error first."""
    nodes = [node for unit in units for node in unit.nodes]
    groups = grouped(nodes, lambda node: (node.module, node.op)).values()
    ranked = sorted(groups, key=lambda nodes: -max(n.local for n in nodes))
    return [_unit(nodes, "") for nodes in ranked]


def joined_units(chosen: Iterable[Unit], units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Joins candidates of single modules if all of the repeated modules were chosen."""
    found = list(chosen)
    for unit in units:
        members = single_units([unit])
        if len(members) > 1 and set(members) <= set(found):
            found = [unit, *(u for u in found if u not in members)]
    return tuple(found)


def faults_of(report: AccuracyReport, units: Sequence[Unit]) -> list[Unit]:
    """Returns the candidates in which the forward overflows, the earliest first."""
    overflows = [s for s in report.suspects if s.kind == "overflow" and s.stage == "forward"]
    members = {index for suspect in overflows for index in suspect.members}
    keys = {(without_numbers(n.module), n.op) for n in report.nodes if n.index in members}
    first = {nodes[0].index for key, nodes in _groups(report).items() if key in keys}
    return sorted((u for u in units if u.order in first), key=lambda u: u.order)


def _unit(nodes: list[OpRecord], why: str) -> Unit:
    modules = list(dict.fromkeys(node.module for node in nodes))
    worst = max(nodes, key=lambda n: n.local)
    own = f"its own error is {number(worst.local)}"
    own += f"; {flush_words(worst)}" if worst.recipe and worst.flushed else ""
    return Unit(
        module=common_pattern(modules) or "*",
        op=nodes[0].op,
        why=why or own,
        order=nodes[0].index,
        nodes=tuple(nodes),
    )


@takes_inputs_later
def search(
    step: Callable[..., Any],
    *,
    tolerance: float,
    metric: Callable[[Any, Any], float] | None = None,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    keep: str | Iterable[str] | None = None,
    budget: int = 60,
    scale: float = 1.0,
    compiler: str | None = "inductor",
) -> Callable[..., SearchResult]:
    """Finds a small set of ops that must run in float32, and a policy for them.

    ``amp_fx.search(step, tolerance=1e-2)(x, y)`` examines the step once (``amp_fx.accuracy``),
    ranks its ops, and runs the step under policies until no op of the set can be omitted. An op of
    repeated layers is one candidate (``h.*.attn``). The set is not always the smallest one, which
    would take a run for each of 2^n sets.

    If the policy runs products in float8, the search finds those that must run in the low dtype.

    Patterns of the policy begin at the modules that the step calls, so that it can be passed to
    ``torch.compile(model, backend="amp_fx", options={"policy": result.policy})``. If the step calls
    several models, the policy applies to each of them, and the result names those in which ops of
    the set were found.

    Each run captures the step again, outside of Dynamo's caches, and runs its rewritten graphs op
    by op. Code outside of graphs follows ``torch.autocast``. State is restored. The last run
    compiles the step.

    Args:
        step: A module or a function; see ``amp_fx.accuracy``.
        tolerance: The largest accepted value of the metric.
        metric: Called with the outputs of the step in mixed precision and in float32. Smaller is
            better, NaN is the worst. By default the largest of the relative errors (L2) of the
            loss, of the outputs, and of all gradients together.
        dtype: The low dtype; by default autocast's for the device type.
        policy: The policy to start from: a ``Policy``, the name of a preset or a policy file.
        keep: Patterns of modules that must stay low.
        budget: The largest number of runs under policies. If it is spent, the result is the
            smallest set so far.
        scale: The factor of the loss for the backward.
        compiler: The inner compiler of the last run, as in ``options={"compiler": ...}``. None
            omits that run.

    Returns:
        A function that takes the step's arguments and returns a ``SearchResult``.

    Raises:
        OptionError: An option has an invalid value.
        UnsupportedError: When called: the metric raises or returns no number, no set meets the
            tolerance, or the step differs from run to run by more than the tolerance.
        UnsupportedError: When called: see ``amp_fx.accuracy``.
    """
    target, asked = asked_for(step, "amp_fx.search", dtype, policy, scale=scale_for(scale))
    check_number("tolerance", tolerance, "a number of at least 0")
    check_number("budget", budget, "a number of runs", least=1, is_whole=True)
    patterns = patterns_of("keep", keep or ())
    if compiler is not None:
        Options.parse({"compiler": compiler})

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def search_call(*args: Any, **kwargs: Any) -> SearchResult:
        with working(f"searching {name_of(target)}"):
            settings = tolerance, metric, patterns, budget, compiler
            return _Search(target, asked, args, kwargs, *settings).run()

    return search_call


Run = tuple[Any, "Outcome"]
"""The outputs of a run of the step; and its outputs and gradients by name."""


@dataclasses.dataclass
class _Search:
    """One search."""

    step: Callable[..., Any]
    asked: Asked
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tolerance: float
    metric: Callable[[Any, Any], float] | None
    keep: tuple[str, ...]
    budget: int
    compiler: str | None

    def __post_init__(self) -> None:
        self.device_type = device_type_of(self.step, (self.args, self.kwargs), self.asked)
        self.dtype = low_dtype_of(self.asked, self.device_type)
        self.history: list[Evaluation] = []
        self.notes: list[str] = []
        self.treatment, self.runs_in = "fp32", "float32"

    def run(self) -> SearchResult:
        """Finds the set."""
        printed = examine(self.step, self.asked, self.args, self.kwargs)
        report = with_paths_in_roots(printed)
        self.reference = self._run(None)
        self._check_repeatable()
        is_float8 = has_float8(report)
        if is_float8:
            self.treatment, self.runs_in = LOW, dtype_name(self.dtype)
        keep = [path_in_root(pattern, dict(printed.roots)) for pattern in self.keep]
        units, num_suspects = units_of(report, keep)
        found = self._minimized(units, num_suspects)
        if found.chosen is None:
            raise self._out_of_reach(found.is_spent)
        chosen, is_minimal = found.chosen, found.is_minimal
        if is_float8:
            members = single_units(chosen)
            if len(members) > len(chosen):
                found = self._minimized(members, 1)
                chosen, is_minimal = found.chosen or chosen, is_minimal and found.is_minimal
        else:
            chosen = self._with_the_fault(chosen, units, report)
            is_minimal &= chosen == found.chosen
        labels = tuple(map(str, chosen))
        value = next(e.value for e in self.history if e.units == labels)
        chosen = joined_units(chosen, units) if is_float8 else chosen
        policy = self._policy(chosen)
        return SearchResult(
            model=name_of(self.step),
            dtype=dtype_name(self.dtype),
            policy=policy,
            units=tuple(_with_roots(unit, printed) for unit in chosen),
            num_units=len(single_units(units) if is_float8 else units),
            tolerance=float(self.tolerance),
            value=value,
            before=self.history[0].value,
            is_minimal=is_minimal,
            runs_in=self.runs_in,
            history=tuple(self.history),
            compiler=self.compiler,
            compiled_value=self._compiled_value(policy),
            notes=tuple(self.notes),
            report=printed,
        )

    def _minimized(self, units: list[Unit], first: int) -> Minimized[Unit]:
        left = self.budget - len(self.history)
        return Minimizer(units, self._is_enough, left, first=first).run()

    def _with_the_fault(
        self, chosen: tuple[Unit, ...], units: list[Unit], report: AccuracyReport
    ) -> tuple[Unit, ...]:
        """Adds the op that overflows first, if other ops only replace it by passing it float32.

        They replace it only as long as no op between rounds to the low dtype.
        """
        faults = faults_of(report, units)
        if not chosen or not faults or set(faults) & {*chosen}:
            return chosen
        joined = tuple(u for u in units if u == faults[0] or u in chosen)
        if len(self.history) >= self.budget or not self._is_enough(joined):
            return chosen
        self.notes.append(
            f"{faults[0]} overflows, and is not enough alone; the others do without it only as "
            "long as their float32 results reach it"
        )
        return joined

    def _policy(self, units: Sequence[Unit]) -> Policy:
        policy = self.asked.policy
        for unit in units:
            policy = with_override(policy, unit.module, unit.op, self.treatment)
        return policy

    def _is_enough(self, units: tuple[Unit, ...]) -> bool:
        run = f"run {len(self.history) + 1} of at most {self.budget}"
        with working(f"{run}, {len(units)} ops in {self.runs_in}"):
            value = self._value(self._run(self._policy(units)))
        is_enough = value <= self.tolerance
        self.history.append(Evaluation(tuple(map(str, units)), value, is_enough))
        return is_enough

    def _check_repeatable(self) -> None:
        """Runs the reference a second time; a step that differs from itself cannot be compared."""
        values = self.reference[1]
        difference = _default_metric(self._run(None)[1], values)
        if difference == math.inf and not all(t.isfinite().all() for t in values.values()):
            raise UnsupportedError("the step itself gives infinite numbers or NaN in float32")
        words = f"the step differs from run to run, by {difference:.3g} in float32"
        if difference > self.tolerance:
            raise UnsupportedError(
                f"{words}, which is more than the tolerance {self.tolerance:g}: seed random "
                "numbers in the step"
            )
        self.notes += [words] if difference else []

    def _out_of_reach(self, is_spent: bool) -> UnsupportedError:
        best = min(self.history, key=lambda e: e.value)
        if is_spent:
            return UnsupportedError(
                f"no sufficient set of ops was found in {len(self.history)} runs; the best value "
                f"is {best.value:.3g}, with {len(best.units)} in {self.runs_in}: give a larger "
                "budget"
            )
        kept = f" outside of {', '.join(self.keep)}" if self.keep else ""
        is_float8 = self.treatment == LOW
        what = "every float8 product" if is_float8 else "everything that a policy reaches"
        return UnsupportedError(
            f"the tolerance {self.tolerance:g} is out of reach: with {what}{kept} in "
            f"{self.runs_in} it is {self.history[-1].value:.3g}, the best was {best.value:.3g}"
            + ("; search without float8 first, and start from the policy found" * is_float8)
        )

    def _value(self, run: Run) -> float:
        if self.metric is None:
            return _default_metric(run[1], self.reference[1])
        try:
            value: Any = self.metric(run[0], self.reference[0])
        except Exception as error:
            raise UnsupportedError(f"the metric raised {type(error).__name__}: {error}") from error
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UnsupportedError(f"the metric returned {value!r}, which is not a number")
        return math.inf if math.isnan(value) else float(value)

    def _run(self, policy: Policy | None, call: Callable[..., Any] | None = None) -> Run:
        """Runs the step under a policy, or in float32; ``call`` is the compiled step."""
        program = Step(self.step, self.args, self.kwargs, loss=self._scaled_loss)
        recorder = Recorder(program.guard, program.paths)  # runs branches and loops as eager code
        if policy is not None and call is None:
            program.region = functools.partial(torch.autocast, self.device_type, self.dtype)
            call = CompiledStep(self.step, policy, recorder)
        eagerly = self.step, recorder.observing
        with isolated(), program.undisturbed(is_eager=call is None):
            values = program.run(*(eagerly if call is None else (call,)))
        compared = {
            name: value
            for name, value in values.items()
            if name.startswith(("output", "gradient")) and value.is_floating_point()
        }
        return program.outputs, compared

    def _scaled_loss(self, outputs: Any) -> torch.Tensor | None:
        loss = loss_of(outputs, None)
        return None if loss is None else loss.float() * self.asked.scale

    def _compiled_value(self, policy: Policy) -> float | None:
        """Returns the metric of the compiled step; None if it was not compiled."""
        if self.compiler is None:
            return None
        compiled = compile_program(
            self.step,
            device_type=self.device_type,
            dtype=self.dtype,
            policy=policy,
            weight_cache=False,
            options={"compiler": self.compiler},
            isolate_recompiles=True,
        )
        try:
            value = self._value(self._run(policy, compiled))
        except AmpFxError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of the inner compiler
            text = str(error).strip().split("\n")[0]
            warnings.warn(
                f"amp_fx.search: the compiled step could not be run: {text}", stacklevel=4
            )
            return None
        if value > self.tolerance:
            self.notes.append(
                f"compiled by {self.compiler} the value is {value:.3g}, above the tolerance"
            )
        return value


def _default_metric(low: Outcome, reference: Outcome) -> float:
    """Returns the largest relative error (L2) of each output, and of all gradients together."""
    names = [name for name in reference if name in low]
    several = [[name] for name in names if name.startswith("output")]
    several.append([name for name in names if name.startswith("gradient")])
    return max(_relative([(low[name], reference[name]) for name in group]) for group in several)


def _relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    error = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    norm = sum(float(b.double().square().sum()) for _, b in pairs)
    found = relative(error, norm)
    return found if math.isfinite(found) else math.inf
