"""``amp_fx.audit``: finds the precision of a training step, and losses of precision."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import ArgumentTypeError, UnsupportedError
from amp_fx.explanation.running import leaf_tensors
from amp_fx.front.settings import unwrap
from amp_fx.numerics.asked import name_of
from amp_fx.numerics.audit.choices import ChoiceRule
from amp_fx.numerics.audit.recording import Auditor
from amp_fx.numerics.audit.regions import Regions
from amp_fx.numerics.audit.report import AuditReport, merged
from amp_fx.numerics.audit.rounding import IntegerRule, LossRule, Roundings, UpcastRule
from amp_fx.numerics.audit.sums import CollectiveRule, GradientRule
from amp_fx.numerics.audit.updates import RunningValueRule, ScalerRule, UpdateRule
from amp_fx.numerics.audit.use_of_regions import LowWeightRule, RegionRule
from amp_fx.numerics.own_casts import regions_of_compiled
from amp_fx.numerics.running import loss_of
from amp_fx.observe.recorder import Recorder
from amp_fx.observe.state import known_to, leaves_of, modules_of, parameters_of
from amp_fx.observe.step import Step
from amp_fx.progress import working
from amp_fx.regions.state import no_autocast
from amp_fx.second_call import takes_inputs_later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.numerics.audit.recording import Rule


@takes_inputs_later
def audit(
    step: Callable[..., Any],
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Callable[..., AuditReport]:
    """Finds the precision in which a training step runs, and losses of precision.

    ``amp_fx.audit(step)(*inputs)`` runs one step and observes each op: forward, backward and
    the step of the optimizer. It restores parameters, buffers, gradients, states of optimizers and
    of scalers, and random numbers, bit for bit. Compiled code runs eagerly, with the same casts;
    under a policy it follows ``torch.autocast``, and a warning says so.

    Args:
        step: A whole training step, which calls ``backward`` and the optimizer. Or a module or
            function that returns the loss: the audit then calls ``backward``.
        optimizer: The optimizer to step after the backward, if the step does not do so.
        scaler: The gradient scaler, if the step does not use it by itself.

    Returns:
        A function that takes the step's arguments and returns an ``AuditReport``.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        UnsupportedError: When called: the step neither calls ``backward`` nor returns a loss.
    """
    target, _ = unwrap(step, "amp_fx.audit")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"optimizer={optimizer!r} is not an optimizer of torch.optim")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentTypeError(f"scaler={scaler!r} is not a GradScaler of torch.amp or amp_fx")

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def audit_call(*args: Any, **kwargs: Any) -> AuditReport:
        with working(f"auditing {name_of(target)}"):
            program = Step(target, args, kwargs, held=filter(None, (optimizer, scaler)))
            with program.undisturbed(is_eager=True):
                try:
                    return _observed(program, step, optimizer, scaler, counts_saved=True)
                except RuntimeError as error:
                    if "saved tensor hooks" not in str(error):
                        raise
                program.restart()  # hooks on saved tensors cannot be used in the step
                return _observed(program, step, optimizer, scaler, counts_saved=False)

    return audit_call


def _observed(
    program: Step,
    step: Callable[..., Any],
    optimizer: torch.optim.Optimizer | None,
    scaler: torch.amp.GradScaler | None,
    *,
    counts_saved: bool,
) -> AuditReport:
    """Runs the step under all rules."""
    regions = Regions()
    rules = _rules(program, regions, [*known_to(program.function), optimizer, scaler])
    auditor, updates = Auditor(regions, rules), UpdateRule()
    recorder = Recorder(program.guard, program.paths, auditor, updates)
    hooks = contextlib.nullcontext() if not counts_saved else _saved_by(auditor)
    torch.clear_autocast_cache()
    try:
        with regions.followed(), regions_of_compiled(step), hooks, recorder.observing():
            loss = loss_of(program.call(step), None)
            value = None if loss is None else loss.detach().clone()
            regions.close()
            with no_autocast():
                _finish(auditor, loss, optimizer, scaler)
    finally:
        torch.clear_autocast_cache()
    auditor.count_members(modules_of(program.function))
    return AuditReport(
        model=name_of(program.function),
        loss=None if value is None else float(value),
        findings=merged(found for rule in (updates, *rules) for found in rule.findings()),
        uses=auditor.uses.listed(),
    )


def _rules(program: Step, regions: Regions, known: list[Any]) -> list[Rule]:
    """Returns the rules, given the values that the step knows."""
    optimizers = [value for value in known if isinstance(value, torch.optim.Optimizer)]
    scalers = [value for value in known if isinstance(value, torch.amp.GradScaler)]
    parameters = [p for module in modules_of(program.function) for p in module.parameters()]
    trained = parameters_of(*optimizers)
    weights = [*dict.fromkeys([*parameters, *leaves_of(program.function), *trained])]
    program.guard.note_inputs([weight for weight in weights if weight.is_leaf])
    roundings = Roundings()
    return [
        LossRule(roundings),
        ChoiceRule(roundings),
        UpcastRule(roundings),
        IntegerRule(),
        roundings,
        GradientRule(weights),
        CollectiveRule(),
        RegionRule(regions),
        LowWeightRule(trained or weights),
        RunningValueRule(leaf_tensors((program.args, program.kwargs))),
        ScalerRule(scalers),
    ]


def _finish(
    auditor: Auditor,
    loss: torch.Tensor | None,
    optimizer: torch.optim.Optimizer | None,
    scaler: torch.amp.GradScaler | None,
) -> None:
    """Calls the backward and steps the optimizer, if the step has not done so."""
    if not auditor.num_backwards:
        if loss is None or not loss.requires_grad:
            raise UnsupportedError(
                "the step neither calls backward() nor returns a loss, a floating-point scalar "
                "that requires gradients: give amp_fx.audit a whole training step"
            )
        if optimizer is not None:
            optimizer.zero_grad()
        torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
    if optimizer is None or auditor.num_updates:
        return
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


@contextlib.contextmanager
def _saved_by(auditor: Auditor) -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(auditor.save, lambda tensor: tensor):
        yield
