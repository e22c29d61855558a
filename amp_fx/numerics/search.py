"""``amp_fx.search``.

A small set of which all members are needed, found by asking of few sets whether they do.

The ranking comes first: sets are the beginnings of it, twice as long each time, and the first one
that does is then divided as QuickXplain does it (Junker, AAAI 2004): which of the later half is
needed if all of the former is there? That takes about 2 k log2(n / k) questions for k of n. If
more is never worse, the set is 1-minimal; whether it is gets asked in the end in any case.

Under a policy that has products in float8 the question is another one: which of these have to go
back to the low dtype. Alike layers are one candidate first; then it is asked which of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from amp_fx.dtypes import dtype_name
from amp_fx.eager.region import autocast
from amp_fx.errors import AmpFxError, OptionError, SearchError
from amp_fx.explanation.table import without_numbers
from amp_fx.front.compile import compile as compile_step
from amp_fx.numerics.entry import (
    Asked,
    asked_for,
    device_type_of,
    examine,
    low_dtype_of,
    name_of,
    scale_for,
)
from amp_fx.numerics.places import CallNotes, is_inside
from amp_fx.numerics.recorder import Recorder
from amp_fx.numerics.records import flush_words, number
from amp_fx.numerics.running import caller_of, loss_of
from amp_fx.numerics.search_result import Evaluation, SearchResult
from amp_fx.numerics.suspects import LOW, common_pattern, weight_of, with_reasons
from amp_fx.numerics.trial import Trial
from amp_fx.options import COMPILERS
from amp_fx.progress import working
from amp_fx.second_call import takes_inputs_later
from amp_fx.tables.cast_policy import CastPolicy
from amp_fx.tables.products import FLOAT32_PRODUCTS

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from amp_fx.numerics.records import OpRecord
    from amp_fx.numerics.report import AccuracyReport
    from amp_fx.numerics.trial import Outcome
    from amp_fx.policies.policy import Policy


@dataclasses.dataclass(frozen=True)
class Unit:
    """An op inside of alike modules.

    Attributes:
        module: A pattern for their paths: ``"h.*.attn"``; ``"*"`` for the outermost one.
        op: What a policy calls it.
        why: What the report has on it.
        order: The number of the first of its ops.
        treatment: A cast policy of its own; empty for that of the search.
        nodes: The ops.
    """

    omitted = ("nodes",)

    module: str
    op: str
    why: str = dataclasses.field(compare=False)
    order: int = dataclasses.field(compare=False)
    treatment: str = ""
    nodes: tuple[OpRecord, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        """``h.*.attn: matmul``."""
        return f"{self.module}: {self.op}"

    @property
    def label(self) -> str:
        """The same with a treatment of its own, if it has one."""
        return f"{self} ({self.treatment})" if self.treatment else str(self)


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
    ranked = sorted(kept, key=lambda key: (order.get(key, len(order)), -weight_of(kept[key])))
    units = [_unit(kept[key], reasons.get(key, "")) for key in ranked]
    return units, sum(key in reasons for key in ranked)


def _groups(report: AccuracyReport) -> dict[tuple[str, str], list[OpRecord]]:
    groups: dict[tuple[str, str], list[OpRecord]] = {}
    is_float8 = has_float8(report)
    for node in report.nodes:
        is_low = bool(node.recipe) if is_float8 else node.dtype in ("float16", "bfloat16")
        if node.stage == "forward" and node.op and is_low:
            groups.setdefault((without_numbers(node.module), node.op), []).append(node)
    return groups


def has_float8(report: AccuracyReport) -> bool:
    """Returns True if a product of the forward runs in float8."""
    return any(node.recipe for node in report.nodes if node.stage == "forward" and node.op)


def single_units(units: Iterable[Unit]) -> list[Unit]:
    """One unit for each module of several, the one whose errors do most to the loss first."""
    groups: dict[tuple[str, str], list[OpRecord]] = {}
    for unit in units:
        for node in unit.nodes:
            groups.setdefault((node.module, node.op), []).append(node)
    ranked = sorted(groups.values(), key=lambda nodes: -max(n.local for n in nodes))
    return [_unit(nodes, "") for nodes in ranked]


def joined_units(chosen: Iterable[Unit], units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Units of single modules, with one pattern for alike modules if all of them are there."""
    found = list(chosen)
    for unit in units:
        members = single_units([unit])
        if len(members) > 1 and set(members) <= set(found):
            found = [unit, *(u for u in found if u not in members)]
    return tuple(found)


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


T = TypeVar("T")

WIDE = CastPolicy.LOWER_PRECISION_WIDE.value
"""The treatment of products that stand low-precision inputs, and no rounding of their results."""


class OutOfBudgetError(Exception):
    """No question is left."""


@dataclasses.dataclass(frozen=True)
class Minimized(Generic[T]):
    """The result of a minimization.

    Attributes:
        chosen: The set, in the order of the ranking; None if no set that was asked about does.
        is_minimal: Whether it was asked of each member, and none can be left out.
        is_spent: Whether the questions were used up before.
    """

    chosen: tuple[T, ...] | None
    is_minimal: bool
    is_spent: bool = False


class Minimizer(Generic[T]):
    """Finds a small set that does, of members that are ranked with the most promising first.

    It begins with the first ``first`` of them. ``rivals`` names members that may stand for two
    others together. ``does`` is asked once for each set, at most ``budget`` times.
    """

    def __init__(
        self,
        ranked: Sequence[T],
        does: Callable[[tuple[T, ...]], bool],
        budget: int,
        first: int = 1,
        rivals: Callable[[T, T], Iterable[T]] = lambda _a, _b: (),
    ) -> None:
        self._ranked = list(ranked)
        self._rank = {member: place for place, member in enumerate(self._ranked)}
        self._does = does
        self._budget = budget
        self._first = max(1, first)
        self._rivals = rivals
        self._known: dict[frozenset[T], bool] = {}
        self._best: tuple[T, ...] | None = None

    def run(self) -> Minimized[T]:
        """Finds it."""
        try:
            prefix = self._shortest_prefix()
            if prefix is None:
                return Minimized(None, is_minimal=False)
            chosen = self._divide([], prefix, is_changed=False) if prefix else []
            if not self._asks(chosen):
                chosen = prefix  # more was worse somewhere
            chosen = self._merged(self._shrunk(chosen))
            return Minimized(self._sorted(self._shrunk(chosen)), is_minimal=True)
        except OutOfBudgetError:
            return Minimized(self._best, is_minimal=False, is_spent=True)

    def _asks(self, members: Iterable[T]) -> bool:
        key = frozenset(members)
        if key not in self._known:
            if len(self._known) >= self._budget:
                raise OutOfBudgetError
            chosen = self._sorted(key)
            self._known[key] = self._does(chosen)
            is_smaller = self._best is None or len(chosen) < len(self._best)
            if self._known[key] and is_smaller:
                self._best = chosen
        return self._known[key]

    def _sorted(self, members: Iterable[T]) -> tuple[T, ...]:
        return tuple(sorted(members, key=self._rank.__getitem__))

    def _shortest_prefix(self) -> list[T] | None:
        length = 0
        while True:
            if self._asks(self._ranked[:length]):
                return self._ranked[:length]
            if length >= len(self._ranked):
                return None
            length = max(self._first, 2 * length)

    def _divide(self, given: list[T], members: list[T], *, is_changed: bool) -> list[T]:
        """Returns the members that are needed besides ``given``."""
        if is_changed and self._asks(given):
            return []
        if len(members) == 1:
            return members
        half = (len(members) + 1) // 2
        former, latter = members[:half], members[half:]
        second = self._divide(given + former, latter, is_changed=True)
        first = self._divide(given + second, former, is_changed=bool(second))
        return first + second

    def _shrunk(self, chosen: list[T]) -> list[T]:
        """Without what can be left out, the least promising first.

        What is needed next to others need not be without them: until nothing changes any more.
        """
        before = len(chosen)
        for member in reversed(self._sorted(chosen)):
            fewer = [other for other in chosen if other != member]
            if self._asks(fewer):
                chosen = fewer
        return chosen if len(chosen) == before else self._shrunk(chosen)

    def _merged(self, chosen: list[T]) -> list[T]:
        """With one member in the place of two, where that does."""
        for index, one in enumerate(chosen):
            for other in chosen[index + 1 :]:
                rest = [m for m in chosen if m not in (one, other)]
                for rival in self._rivals(one, other):
                    if rival not in chosen and self._asks([*rest, rival]):
                        return self._merged([*rest, rival])
        return chosen


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
    """Finds a small set of ops that have to run in float32, and the policy that says so.

    Products of the set for which a float32 result of low-precision inputs is enough get
    ``lower_precision_wide``, which costs less.

    If the policy runs products in float8, it finds those that have to run in the low dtype.

    ``amp_fx.search(step, tolerance=1e-2)(x, y)`` examines the step once (``amp_fx.accuracy``),
    ranks ops by that, and runs the step under policies until it has a set from which none can be
    left out. Alike layers are one candidate (``h.*.attn``). It is not always the smallest
    there is: that would take a run for each of 2^n sets.

    Runs are eager and change nothing of the user's. The last one is of the step compiled, outside
    of Dynamo's caches. The kernels through which eager regions follow policies for modules
    stay in the process, and make eager code under such policies possible, and slower.

    Args:
        step: A module or a function; see ``amp_fx.accuracy``.
        tolerance: The largest value of the metric that will do.
        metric: Called with what the step gives in mixed precision and in float32; smaller is
            better, NaN is the worst. By default the largest of the relative errors (L2) of the
            loss, of the outputs, and of all gradients together.
        dtype: What low-precision ops run in; by default autocast's for the device type.
        policy: What to start from: a ``Policy``, the name of a preset or a policy file.
        keep: Patterns of modules that must stay low.
        budget: The most runs under policies; in the end the smallest set so far is given.
        scale: What the loss is multiplied with for the backward.
        compiler: The inner compiler of the last run: that of ``options={"compiler": ...}``.
            None leaves it out.

    Returns:
        A function that takes the step's arguments and gives a ``SearchResult``.

    Raises:
        OptionError: An option has a value that is not allowed.
        SearchError: When called: the metric raises or gives no number, the tolerance is out of
            reach (says what the best is), or the step differs by more than that from run to run.
        AccuracyError: When called: see ``amp_fx.accuracy``.
    """
    target, asked = asked_for(step, "amp_fx.search", dtype, policy, scale=scale_for(scale))
    options = _Options(
        tolerance=_tolerance(tolerance),
        metric=metric,
        keep=_patterns(keep),
        budget=_budget(budget),
        compiler=_compiler(compiler),
    )

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def search_call(*args: Any, **kwargs: Any) -> SearchResult:
        with working(f"searching {name_of(target)}"):
            return _Search(target, asked, options, args, kwargs).run()

    return search_call


@dataclasses.dataclass(frozen=True)
class _Options:
    tolerance: float
    metric: Callable[[Any, Any], float] | None
    keep: tuple[str, ...]
    budget: int
    compiler: str | None


def _tolerance(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise OptionError(f"tolerance={value!r} is not a number of at least 0")
    return float(value)


def _budget(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"budget={value!r} is not a number of runs")
    return value


def _patterns(keep: Any) -> tuple[str, ...]:
    found = (keep,) if isinstance(keep, str) else keep or ()
    if not isinstance(found, (tuple, list)) or not all(isinstance(p, str) for p in found):
        raise OptionError(f"keep={keep!r}: give patterns of module paths, like 'h.*.mlp'")
    return tuple(found)


def _compiler(value: Any) -> str | None:
    if value is not None and value not in COMPILERS:
        raise OptionError(f"compiler={value!r} is not one of {', '.join(map(repr, COMPILERS))}")
    return value  # type: ignore[no-any-return]


class _Run(NamedTuple):
    """One run of the step: what it returns, and outputs and gradients by name."""

    outputs: Any
    values: Outcome


class _Search:
    """One search."""

    def __init__(
        self,
        step: Callable[..., Any],
        asked: Asked,
        options: _Options,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.step, self.asked, self.options = step, asked, options
        self.args, self.kwargs = args, kwargs
        self.device_type = device_type_of(step, (args, kwargs), asked)
        self.dtype = low_dtype_of(asked, self.device_type)
        self.history: list[Evaluation] = []
        self.notes: list[str] = []
        self.treatment, self.runs_in = "fp32", "float32"

    def run(self) -> SearchResult:
        """Finds the set."""
        report = examine(self.step, self.asked, self.args, self.kwargs)
        self.reference = self._run(None)
        self._check_repeatable()
        is_float8 = has_float8(report)
        if is_float8:
            self.treatment, self.runs_in = LOW, dtype_name(self.dtype)
        units, num_suspects = units_of(report, self.options.keep)
        found = self._minimized(units, num_suspects)
        if found.chosen is None:
            raise self._out_of_reach(found.is_spent)
        chosen = found.chosen
        if is_float8:
            chosen, is_minimal = self._of_single_modules(chosen)
            is_minimal &= found.is_minimal
        else:
            chosen = self._with_the_fault(chosen, units, report)
            is_minimal = found.is_minimal and chosen == found.chosen
            chosen = self._with_cheaper_products(chosen)
        labels = tuple(unit.label for unit in chosen)
        value = next(e.value for e in self.history if e.units == labels)
        chosen = joined_units(chosen, units) if is_float8 else chosen
        policy = self._policy(chosen)
        return SearchResult(
            model=name_of(self.step),
            dtype=dtype_name(self.dtype),
            policy=policy,
            units=chosen,
            num_units=len(single_units(units) if is_float8 else units),
            tolerance=self.options.tolerance,
            value=value,
            before=self.history[0].value,
            is_minimal=is_minimal,
            runs_in=self.runs_in,
            history=tuple(self.history),
            compiler=self.options.compiler,
            compiled_value=self._compiled_value(policy),
            notes=tuple(self.notes),
            report=report,
        )

    def _minimized(self, units: list[Unit], first: int) -> Minimized[Unit]:
        left = self.options.budget - len(self.history)
        rivals = functools.partial(_rivals, units) if self.treatment == "fp32" else _no_rivals
        return Minimizer(units, self._does, left, first=first, rivals=rivals).run()

    def _of_single_modules(self, chosen: tuple[Unit, ...]) -> tuple[tuple[Unit, ...], bool]:
        """Returns the needed ones of equal modules, and True if they are minimal."""
        members = single_units(chosen)
        if len(members) == len(chosen):
            return chosen, True
        found = self._minimized(members, 1)
        return found.chosen or chosen, found.is_minimal

    def _with_the_fault(
        self, chosen: tuple[Unit, ...], units: list[Unit], report: AccuracyReport
    ) -> tuple[Unit, ...]:
        """Adds the op that overflows first where the set does only by handing it float32.

        That holds as long as nothing turns the stream low in between; naming the op always does.
        """
        faults = faults_of(report, units)
        if not chosen or not faults or set(faults) & {*chosen}:
            return chosen
        joined = tuple(u for u in units if u == faults[0] or u in chosen)
        if len(self.history) >= self.options.budget or not self._does(joined):
            return chosen
        self.notes.append(
            f"{faults[0]} overflows, and is not enough alone; the others do without it only as "
            "long as their float32 results reach it"
        )
        return joined

    def _with_cheaper_products(self, chosen: tuple[Unit, ...]) -> tuple[Unit, ...]:
        """Gives products low-precision inputs again, if a float32 result is enough for them."""
        products = [unit for unit in chosen if f"aten::{unit.op}" in FLOAT32_PRODUCTS]
        for group in (products, *([unit] for unit in products if len(products) > 1)):
            cheaper = tuple(
                dataclasses.replace(unit, treatment=WIDE) if unit in group else unit
                for unit in chosen
            )
            if cheaper == chosen or len(self.history) >= self.options.budget:
                continue
            if self._does(cheaper):
                chosen = cheaper
        return chosen

    def _policy(self, units: Sequence[Unit]) -> Policy:
        policy = self.asked.policy
        for unit in units:
            entry = unit.module, unit.op, unit.why
            policy = with_reasons(policy, [entry], unit.treatment or self.treatment)
        return policy

    def _does(self, units: tuple[Unit, ...]) -> bool:
        run = f"run {len(self.history) + 1} of at most {self.options.budget}"
        with working(f"{run}, {len(units)} ops in {self.runs_in}"):
            value = self._value(self._run(self._policy(units)))
        is_enough = value <= self.options.tolerance
        self.history.append(Evaluation(tuple(u.label for u in units), value, is_enough))
        return is_enough

    def _check_repeatable(self) -> None:
        """Runs the reference once more: a step that differs from itself cannot be compared."""
        differs = _default_metric(self._run(None), self.reference)
        if differs == math.inf and not all(
            t.isfinite().all() for t in self.reference.values.values()
        ):
            raise SearchError("the step itself gives infinite numbers or NaN in float32")
        if differs > self.options.tolerance:
            raise SearchError(
                f"the step differs from run to run, by {differs:.3g} in float32, which is more "
                f"than the tolerance {self.options.tolerance:g}: seed random numbers in the step"
            )
        if differs:
            self.notes.append(f"the step differs from run to run, by {differs:.3g} in float32")

    def _out_of_reach(self, is_spent: bool) -> SearchError:
        best = min(self.history, key=lambda e: e.value)
        if is_spent:
            return SearchError(
                f"no set of ops that does was found in {len(self.history)} runs; the best value is "
                f"{best.value:.3g}, with {len(best.units)} in {self.runs_in}: give a larger budget"
            )
        kept = f" outside of {', '.join(self.options.keep)}" if self.options.keep else ""
        is_float8 = self.treatment == LOW
        what = "every float8 product" if is_float8 else "everything that a policy reaches"
        return SearchError(
            f"the tolerance {self.options.tolerance:g} is out of reach: with {what}{kept} in "
            f"{self.runs_in} it is {self.history[-1].value:.3g}, the best was {best.value:.3g}"
            + ("; search without float8 first, and start from what that finds" * is_float8)
        )

    def _value(self, run: _Run) -> float:
        metric = self.options.metric
        if metric is None:
            return _default_metric(run, self.reference)
        try:
            value: Any = metric(run.outputs, self.reference.outputs)
        except Exception as error:
            raise SearchError(f"the metric raised {type(error).__name__}: {error}") from error
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SearchError(f"the metric returned {value!r}, which is not a number")
        return math.inf if math.isnan(value) else float(value)

    def _run(self, policy: Policy | None, call: Callable[..., Any] | None = None) -> _Run:
        """Runs the step: under a policy, or in float32."""
        trial = Trial(self.step, self.args, self.kwargs, loss=self._scaled_loss)
        if call is None and policy is not None:
            trial.region = functools.partial(autocast, self.device_type, self.dtype, policy=policy)

        @contextlib.contextmanager
        def watch() -> Iterator[None]:
            """Runs branches and loops as eager code, in the region and in the backward."""
            with CallNotes(), Recorder(trial.guard):
                yield

        with trial.undisturbed(is_eager=call is None):
            eagerly = (caller_of(self.step), watch)
            values = trial.run(*(eagerly if call is None else (call,)))
        found = {n: v for n, v in values.items() if n.startswith(("output", "gradient"))}
        return _Run(trial.outputs, {n: v for n, v in found.items() if v.is_floating_point()})

    def _scaled_loss(self, outputs: Any) -> torch.Tensor | None:
        loss = loss_of(outputs, None)
        return None if loss is None else loss.float() * self.asked.scale

    def _compiled_value(self, policy: Policy) -> float | None:
        """The metric of the step compiled, with entries of its own in Dynamo's cache."""
        if self.options.compiler is None:
            return None
        from amp_fx.explanation.running import isolated

        with isolated():
            compiled = compile_step(
                self.step,
                device_type=self.device_type,
                dtype=self.dtype,
                policy=policy,
                weight_cache=False,
                options={"compiler": self.options.compiler},
                isolate_recompiles=True,
            )
            try:
                value = self._value(self._run(policy, compiled))
            except AmpFxError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the inner compiler raises
                text = str(error).strip().split("\n")[0]
                warnings.warn(
                    f"amp_fx.search: the compiled step could not be run: {text}", stacklevel=4
                )
                return None
        if value > self.options.tolerance:
            self.notes.append(
                f"compiled by {self.options.compiler} the value is {value:.3g}, above the tolerance"
            )
        return value


def _default_metric(low: _Run, reference: _Run) -> float:
    """The largest relative error (L2): of each output, and of all gradients together."""
    common = [name for name in reference.values if name in low.values]
    outputs = [[name] for name in common if name.startswith("output")]
    gradients = [name for name in common if name.startswith("gradient")]
    several = [*outputs, gradients] if gradients else outputs
    pairs = ([run.values[name] for name in names] for names in several for run in (low, reference))
    return max((_relative(*pair) for pair in zip(pairs, pairs, strict=True)), default=0.0)


def _relative(low: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    error = sum(
        float((a.double() - b.double()).square().sum()) for a, b in zip(low, reference, strict=True)
    )
    norm = sum(float(b.double().square().sum()) for b in reference)
    if error == 0:
        return 0.0
    return math.sqrt(error / norm) if norm and math.isfinite(error) else math.inf


def _no_rivals(_one: Unit, _other: Unit) -> list[Unit]:
    return []


MOST_RIVALS = 3


def _rivals(units: Sequence[Unit], one: Unit, other: Unit) -> list[Unit]:
    """Ops of a module that stand before two others of it: their float32 results go on to both."""
    if one.module != other.module:
        return []
    last = max(one.order, other.order)
    before = [u for u in units if u.module == one.module and u.order <= last]
    return [u for u in before if u not in (one, other)][:MOST_RIVALS]
