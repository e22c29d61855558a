"""``amp_fx.search``: finds a small set of ops that must run in higher precision.

The report of ``amp_fx.accuracy`` ranks the candidates; ``Minimizer`` finds the set by running the
step under policies. A candidate is an op of repeated modules. If the policy has float8 products,
the candidates are these products, which then run in the low dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.backend.entry import amp_fx
from amp_fx.dtypes import dtype_name
from amp_fx.errors import UnsupportedError
from amp_fx.explanation.running import isolated, optimized
from amp_fx.explanation.table import without_numbers
from amp_fx.graphs.bodies import graph_modules_in, graphs_in
from amp_fx.graphs.metadata import DECISIONS
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
from amp_fx.numerics.equality import relative_error
from amp_fx.numerics.minimizer import Minimizer
from amp_fx.numerics.records import grouped, number
from amp_fx.numerics.running import loss_of
from amp_fx.numerics.search_result import Evaluation, SearchResult, Unit
from amp_fx.numerics.suspects import common_pattern, weight_of
from amp_fx.observe.places import EAGER_FORMS, is_inside
from amp_fx.observe.recorder import Recorder
from amp_fx.observe.step import Step
from amp_fx.policies.float8 import float8_product
from amp_fx.progress import working
from amp_fx.regions.module_stack import compile_frame, module_stack
from amp_fx.second_call import takes_inputs_later
from amp_fx.tables.cast_policy import CastPolicy

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from torch import fx

    from amp_fx.numerics.records import OpRecord
    from amp_fx.numerics.report import AccuracyReport
    from amp_fx.observe.step import Outcome
    from amp_fx.policies.policy import Policy
    from amp_fx.regions.module_stack import CompileFrame

LOW = "lower_precision_fp"
"""The treatment of products for which float8 is too imprecise."""


def low_ops_of(gm: fx.GraphModule, frame: CompileFrame) -> dict[tuple[str, str], bool]:
    """Returns the low ops of a rewritten graph, by the path of the module and the op.

    Returns:
        True for products in float8, and False for other ops.
    """
    found = {}
    for node in [node for graph in graphs_in(gm) for node in graph.nodes]:
        is_float8 = node.target is float8_product
        path = next((entry[0] for entry in reversed(module_stack(node, frame))), "")
        for decision in DECISIONS.get(node) or ():
            if is_float8 or decision.policy is CastPolicy.LOWER_PRECISION_FP:
                op = decision.op.removeprefix("aten::").partition(".")[0]
                found[path, op] = is_float8
    return found


def _run_as_eager_code(gm: fx.GraphModule) -> Callable[..., Any]:
    """Returns the code of a graph whose branches, loops and checkpoints run as eager code.

    A checkpoint that runs its body again saves buffers, which batch norms in the body write.
    """
    for graph in graphs_in(gm):
        for node in graph.nodes:
            node.target = EAGER_FORMS.get(str(node.target), node.target)
    for module in graph_modules_in(gm):
        module.recompile()
    return gm.forward


def units_of(
    report: AccuracyReport, low_ops: dict[tuple[str, str], bool], keep: Sequence[str]
) -> list[Unit]:
    """Returns all candidates, the most promising first.

    Suspects are in the order of the report. The other candidates are ranked by the effect of their
    errors on the loss.

    Args:
        report: The report on the step under ``torch.autocast``.
        low_ops: The low ops under the policy of the search, and whether they are in float8.
        keep: Patterns of modules whose ops are no candidates.
    """
    labels = [label for label, _ in report.roots]
    has_float8 = any(low_ops.values())
    alike: Callable[[str], str] = str if has_float8 else without_numbers
    ops: list[tuple[str, str, OpRecord | None]] = [
        (path_in_root(node.module, labels), node.op, node)
        for node in report.nodes
        if not has_float8 and node.stage == "forward" and node.op and node.dtype in LOW_DTYPES
    ]
    ops += [(*place, None) for place, is_float8 in low_ops.items() if is_float8 is has_float8]
    suspects = {
        (alike(path_in_root(suspect.module.replace("*", "0"), labels)), suspect.op): suspect
        for suspect in report.suspects
        if suspect.is_mendable
    }
    order = {key: place for place, key in enumerate(suspects)}
    patterns = [path_in_root(pattern, labels) for pattern in keep]
    ranked = []
    for key, members in grouped(ops, lambda op: (alike(op[0]), op[1])).items():
        paths = dict.fromkeys(path for path, _, _ in members)
        if any(is_inside(path, patterns) for path in paths):
            continue
        suspect = suspects.get(key)
        kind, why = ("", "") if suspect is None else (suspect.kind, suspect.why)
        unit = Unit(common_pattern([*paths]) or "*", key[1], why, kind)
        weight = weight_of([node for _, _, node in members if node is not None])
        ranked.append((order.get(key, len(order)), -weight, unit))
    ranked.sort(key=lambda each: each[:2])
    return [unit for _, _, unit in ranked]


LOW_DTYPES = ("float16", "bfloat16")
"""Names of the dtypes of ops that a policy can run in float32."""


def path_in_root(module: str, roots: Iterable[str]) -> str:
    """Returns the path of a module without the label of its root: patterns begin at the root.

    Args:
        module: A path as it is printed, or a pattern.
        roots: The labels of the roots, if there are several.
    """
    labels = [label for label in roots if module == label or module.startswith(f"{label}.")]
    return module.removeprefix(max(labels, key=len)).removeprefix(".") if labels else module


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
) -> Callable[..., SearchResult]:
    """Finds a small set of ops that must run in float32, and a policy for them.

    ``amp_fx.search(step, tolerance=1e-2)(x, y)`` examines the step once (``amp_fx.accuracy``),
    ranks its ops, and runs the step under policies until no op of the set can be omitted. An op of
    repeated layers is one candidate (``h.*.attn``). The set is not always the smallest one, which
    would take a run for each of 2^n sets.

    If the policy runs products in float8, the search finds those that must run in the low dtype;
    then each product is a candidate.

    Patterns of the policy begin at the modules that the step calls, so that it can be passed to
    ``torch.compile(model, backend="amp_fx", options={"policy": result.policy})``. If the step calls
    several models, the policy applies to each of them.

    Each run captures the step again, outside of Dynamo's caches, and runs its rewritten graphs op
    by op. Code outside of graphs follows ``torch.autocast``. State is restored.

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

    Returns:
        A function that takes the step's arguments and returns a ``SearchResult``.

    Raises:
        OptionError: An option has an invalid value.
        UnsupportedError: When called: the metric raises or returns no number, no set meets the
            tolerance, the step differs from run to run by more than the tolerance, or Dynamo
            captures no graph of it.
        UnsupportedError: When called: see ``amp_fx.accuracy``.
    """
    target, asked = asked_for(step, "amp_fx.search", dtype, policy, scale=scale_for(scale))
    check_number("tolerance", tolerance, "a number of at least 0")
    check_number("budget", budget, "a number of runs", least=1, is_whole=True)
    patterns = patterns_of("keep", keep or ())

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def search_call(*args: Any, **kwargs: Any) -> SearchResult:
        with working(f"searching {name_of(target)}"):
            settings = tolerance, metric, patterns, budget
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

    def __post_init__(self) -> None:
        self.device_type = device_type_of(self.step, (self.args, self.kwargs), self.asked)
        self.dtype = low_dtype_of(self.asked, self.device_type)
        self.history: dict[tuple[str, ...], Evaluation] = {}
        self.notes: list[str] = []
        self.low_ops: dict[tuple[str, str], bool] = {}
        self.num_graphs = 0
        self.treatment, self.runs_in = "fp32", "float32"

    def run(self) -> SearchResult:
        """Finds the set."""
        report = examine(self.step, self.asked, self.args, self.kwargs)
        self.reference = self._run(None)
        self._check_repeatable()
        self._is_enough(())  # also finds the ops that the policy runs in low precision
        if not self.num_graphs:
            raise UnsupportedError(
                "policies apply to compiled code only, and Dynamo captured no graph of the step"
            )
        if any(self.low_ops.values()):
            self.treatment, self.runs_in = LOW, dtype_name(self.dtype)
        units = units_of(report, self.low_ops, self.keep)
        num_suspects = sum(bool(unit.kind) for unit in units)
        found = Minimizer(units, self._is_enough, self.budget, first=num_suspects).run()
        if found.chosen is None:
            raise self._out_of_reach(found.is_spent)
        chosen = self._with_the_fault(found.chosen, units)
        return SearchResult(
            model=name_of(self.step),
            dtype=dtype_name(self.dtype),
            policy=self._policy(chosen),
            units=tuple(self._with_reason(unit, chosen) for unit in chosen),
            num_units=len(units),
            tolerance=float(self.tolerance),
            value=self.history[_labels(chosen)].value,
            before=self.history[()].value,
            is_minimal=found.is_minimal and chosen == found.chosen,
            runs_in=self.runs_in,
            history=tuple(self.history.values()),
            notes=tuple(self.notes),
            report=report,
        )

    def _with_the_fault(self, chosen: tuple[Unit, ...], units: list[Unit]) -> tuple[Unit, ...]:
        """Adds the op that overflows first, if other ops only replace it by passing it float32.

        They replace it only as long as no op between rounds to the low dtype.
        """
        faults = [unit for unit in units if unit.kind == "overflow"]
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

    def _with_reason(self, unit: Unit, chosen: tuple[Unit, ...]) -> Unit:
        """Returns a candidate; without a reason of the report, that is the value without it."""
        without = self.history.get(_labels(other for other in chosen if other != unit))
        if unit.why or without is None:
            return unit
        return dataclasses.replace(unit, why=f"without it, the value is {number(without.value)}")

    def _policy(self, units: Iterable[Unit]) -> Policy:
        """Returns the policy with ops in higher precision; ``"*"`` is an op outside of modules."""
        policy = self.asked.policy
        for unit in units:
            entry = {unit.op: self.treatment}
            is_anywhere = unit.module == "*"
            policy = (
                policy.with_ops(entry) if is_anywhere else policy.with_modules({unit.module: entry})
            )
        return policy

    def _is_enough(self, units: tuple[Unit, ...]) -> bool:
        labels = _labels(units)
        if labels not in self.history:
            run = f"run {len(self.history) + 1} of at most {self.budget}"
            with working(f"{run}, {len(units)} ops in {self.runs_in}"):
                value = self._value(self._run(self._policy(units)))
            self.history[labels] = Evaluation(labels, value, value <= self.tolerance)
        return self.history[labels].is_enough

    def _check_repeatable(self) -> None:
        """Runs the reference a second time; a step that differs from itself cannot be compared."""
        values = self.reference[1]
        if not all(t.isfinite().all() for t in values.values()):
            raise UnsupportedError("the step itself gives infinite numbers or NaN in float32")
        difference = _default_metric(self._run(None)[1], values)
        words = f"the step differs from run to run, by {difference:.3g} in float32"
        if difference > self.tolerance:
            raise UnsupportedError(
                f"{words}, which is more than the tolerance {self.tolerance:g}: seed random "
                "numbers in the step"
            )
        self.notes += [words] if difference else []

    def _out_of_reach(self, is_spent: bool) -> UnsupportedError:
        evaluations = list(self.history.values())
        best = min(evaluations, key=lambda e: e.value)
        if is_spent:
            return UnsupportedError(
                f"no sufficient set of ops was found in {len(evaluations)} runs; the best value "
                f"is {best.value:.3g}, with {len(best.units)} in {self.runs_in}: give a larger "
                "budget"
            )
        kept = f" outside of {', '.join(self.keep)}" if self.keep else ""
        is_float8 = self.treatment == LOW
        what = "every float8 product" if is_float8 else "everything that a policy reaches"
        return UnsupportedError(
            f"the tolerance {self.tolerance:g} is out of reach: with {what}{kept} in "
            f"{self.runs_in} it is {evaluations[-1].value:.3g}, the best was {best.value:.3g}"
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

    def _run(self, policy: Policy | None) -> Run:
        """Runs the step under a policy, or in float32."""
        program = Step(self.step, self.args, self.kwargs, loss=self._scaled_loss)
        recorder = Recorder(program.guard, program.paths)  # runs branches and loops as eager code
        call: tuple[Any, ...] = self.step, recorder.observing
        if policy is not None:
            program.region = functools.partial(torch.autocast, self.device_type, self.dtype)
            call = (self._compiled(policy),)
        with isolated(), program.undisturbed(is_eager=policy is None):
            values = program.run(*call)
        compared = {
            name: value
            for name, value in values.items()
            if name.startswith(("output", "gradient")) and value.is_floating_point()
        }
        return program.outputs, compared

    def _compiled(self, policy: Policy) -> Callable[..., Any]:
        """Returns the step with its graphs rewritten, which run op by op."""

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            self.num_graphs += 1
            frame = compile_frame(gm)

            def compiler(rewritten: fx.GraphModule, _: Any) -> Callable[..., Any]:
                if not self.history:  # the policy at the start
                    self.low_ops |= low_ops_of(rewritten, frame)
                return _run_as_eager_code(rewritten)

            options = {"compiler": compiler, "policy": policy, "weight_cache": False}
            return amp_fx(gm, example_inputs, options=options)

        compiled: Callable[..., Any] = optimized(backend)(self.step)
        return compiled

    def _scaled_loss(self, outputs: Any) -> torch.Tensor | None:
        loss = loss_of(outputs, None)
        return None if loss is None else loss.float() * self.asked.scale


def _labels(units: Iterable[Unit]) -> tuple[str, ...]:
    return tuple(map(str, units))


def _default_metric(low: Outcome, reference: Outcome) -> float:
    """Returns the largest relative error (L2) of each output, and of all gradients together."""
    names = [name for name in reference if name in low]
    several = [[name] for name in names if name.startswith("output")]
    several.append([name for name in names if name.startswith("gradient")])
    return max(relative_error((reference[n], low[n]) for n in group) for group in several)
