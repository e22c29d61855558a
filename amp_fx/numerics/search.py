"""``amp_fx.search``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from amp_fx.dtypes import dtype_name
from amp_fx.errors import AmpFxError, OptionError, SearchError
from amp_fx.front.compile import compile as compile_step
from amp_fx.front.settings import as_dtype
from amp_fx.numerics.entry import (
    Asked,
    caller_of,
    device_type_of,
    examine,
    low_dtype_of,
    name_of,
    policy_for,
    scale_for,
    unwrap,
)
from amp_fx.numerics.minimize import Minimizer
from amp_fx.numerics.places import CallNotes
from amp_fx.numerics.policies import with_reasons
from amp_fx.numerics.repeat import tensors_in
from amp_fx.numerics.running import loss_of, undisturbed
from amp_fx.numerics.search_result import Evaluation, SearchResult
from amp_fx.numerics.state import GuardMode, guard_of, modules_of
from amp_fx.numerics.units import Unit, faults_of, units_of
from amp_fx.options import COMPILERS
from amp_fx.regions.region import autocast
from amp_fx.tables.presets import torch_version

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from amp_fx.numerics.report import AccuracyReport
    from amp_fx.policies.policy import Policy


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
    target, given = unwrap(step, "amp_fx.search")
    asked = Asked(
        dtype=given.dtype if dtype is None else as_dtype(dtype),
        policy=policy_for(policy, given),
        device_type=given.device_type,
        scale=scale_for(scale),
    )
    options = _Options(
        tolerance=_tolerance(tolerance),
        metric=metric,
        keep=_patterns(keep),
        budget=_budget(budget),
        compiler=_compiler(compiler),
    )

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def search_call(*args: Any, **kwargs: Any) -> SearchResult:
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


@dataclasses.dataclass
class _Outcome:
    """What one run of the step gave."""

    outputs: Any
    floats: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


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

    def run(self) -> SearchResult:
        """Finds the set."""
        report = examine(self.step, self.asked, self.args, self.kwargs)
        self.reference = self._outcome(None)
        self._check_repeatable()
        units, num_suspects = units_of(report, self.options.keep)
        minimizer = Minimizer(
            units,
            self._does,
            self.options.budget,
            first=num_suspects,
            rivals=functools.partial(_rivals, units),
        )
        found = minimizer.run()
        if found.chosen is None:
            raise self._out_of_reach(found.is_spent)
        chosen = self._with_the_fault(found.chosen, units, report)
        policy = self._policy(chosen)
        value = next(e.value for e in self.history if e.units == tuple(map(str, chosen)))
        return SearchResult(
            model=name_of(self.step),
            dtype=dtype_name(self.dtype),
            policy=policy,
            units=chosen,
            num_units=len(units),
            tolerance=self.options.tolerance,
            value=value,
            before=self.history[0].value,
            is_minimal=found.is_minimal and chosen == found.chosen,
            history=tuple(self.history),
            compiler=self.options.compiler,
            compiled_value=self._compiled_value(policy),
            notes=tuple(self.notes),
            report=report,
        )

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

    def _policy(self, units: Sequence[Unit]) -> Policy:
        return with_reasons(self.asked.policy, [(u.module, u.op, u.why) for u in units])

    def _does(self, units: tuple[Unit, ...]) -> bool:
        value = self._value(self._outcome(self._policy(units)))
        is_enough = value <= self.options.tolerance
        self.history.append(Evaluation(tuple(map(str, units)), value, is_enough))
        return is_enough

    def _check_repeatable(self) -> None:
        """Runs the reference once more: a step that differs from itself cannot be compared."""
        differs = _default_metric(self._outcome(None), self.reference)
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
                f"{best.value:.3g}, with {len(best.units)} in float32: give a larger budget"
            )
        kept = f" outside of {', '.join(self.options.keep)}" if self.options.keep else ""
        return SearchError(
            f"the tolerance {self.options.tolerance:g} is out of reach: with everything that a "
            f"policy reaches{kept} in float32 it is {self.history[-1].value:.3g}, the best was "
            f"{best.value:.3g}"
        )

    def _value(self, outcome: _Outcome) -> float:
        metric = self.options.metric
        if metric is None:
            return _default_metric(outcome, self.reference)
        try:
            value: Any = metric(outcome.outputs, self.reference.outputs)
        except Exception as error:
            raise SearchError(f"the metric raised {type(error).__name__}: {error}") from error
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SearchError(f"the metric returned {value!r}, which is not a number")
        return math.inf if math.isnan(value) else float(value)

    def _outcome(self, policy: Policy | None, call: Callable[..., Any] | None = None) -> _Outcome:
        """Runs the step: under a policy, or in float32."""
        guard = guard_of(self.step)
        region: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if policy is not None and call is None:
            region = autocast(self.device_type, self.dtype, policy=policy)
        is_eager = call is None
        with undisturbed(guard, is_eager=is_eager), contextlib.ExitStack() as modes:
            if is_eager:
                modes.enter_context(CallNotes())  # branches and loops as eager code
                modes.enter_context(GuardMode(guard, torch.float32))
            with region:
                outputs = (call or caller_of(self.step))(*self.args, **self.kwargs)
            return self._with_gradients(outputs)

    def _with_gradients(self, outputs: Any) -> _Outcome:
        loss = loss_of(outputs, None)
        floats = [t for t in tensors_in(outputs) if t.is_floating_point()]
        begin = [loss] if loss is not None and loss.requires_grad else []
        parameters = [p for m in modules_of(self.step) for p in m.parameters() if p.requires_grad]
        gradients: list[torch.Tensor | None] = []
        if begin and parameters:
            scale = torch.full_like(begin[0], self.asked.scale)
            found = torch.autograd.grad(begin, parameters, scale, allow_unused=True)
            gradients = [None if g is None else g.detach().clone() for g in found]
        detached = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), outputs)
        return _Outcome(detached, [t.detach().clone() for t in floats], gradients)

    def _compiled_value(self, policy: Policy) -> float | None:
        """The metric of the step compiled, with entries of its own in Dynamo's cache."""
        if self.options.compiler is None:
            return None
        from amp_fx.explanation.running import isolated

        settings: dict[str, Any] = {"options": {"compiler": self.options.compiler}}
        if torch_version() >= (2, 13):  # before, this uses up one of the step's recompilations
            settings["isolate_recompiles"] = True
        with isolated():
            compiled = compile_step(
                self.step,
                device_type=self.device_type,
                dtype=self.dtype,
                policy=policy,
                weight_cache=False,
                **settings,
            )
            guard = guard_of(self.step)
            guard.save_all([*self._state(), *tensors_in((self.args, self.kwargs))])
            try:
                value = self._value(self._outcome(policy, compiled))
            except AmpFxError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the inner compiler raises
                text = str(error).strip().split("\n")[0]
                warnings.warn(
                    f"amp_fx.search: the compiled step could not be run: {text}", stacklevel=4
                )
                return None
            finally:
                guard.restore()
        if value > self.options.tolerance:
            self.notes.append(
                f"compiled by {self.options.compiler} the value is {value:.3g}, above the tolerance"
            )
        return value

    def _state(self) -> list[torch.Tensor]:
        modules = modules_of(self.step)
        return [t for m in modules for t in (*m.parameters(), *m.buffers())]


def _default_metric(low: _Outcome, reference: _Outcome) -> float:
    """The largest relative error (L2): of each output, and of all gradients together."""
    pairs = [([a], [b]) for a, b in zip(low.floats, reference.floats, strict=False)]
    both = [
        (a, b)
        for a, b in zip(low.gradients, reference.gradients, strict=False)
        if a is not None and b is not None
    ]
    if both:
        pairs.append(([a for a, _ in both], [b for _, b in both]))
    return max((_relative(a, b) for a, b in pairs), default=0.0)


def _relative(low: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    error = sum(
        float((a.double() - b.double()).square().sum()) for a, b in zip(low, reference, strict=True)
    )
    norm = sum(float(b.double().square().sum()) for b in reference)
    if error == 0:
        return 0.0
    return math.sqrt(error / norm) if norm and math.isfinite(error) else math.inf


MOST_RIVALS = 3


def _rivals(units: Sequence[Unit], one: Unit, other: Unit) -> list[Unit]:
    """Ops of a module that stand before two others of it: their float32 results go on to both."""
    if one.module != other.module:
        return []
    last = max(one.order, other.order)
    before = [u for u in units if u.module == one.module and u.order <= last]
    return [u for u in before if u not in (one, other)][:MOST_RIVALS]
