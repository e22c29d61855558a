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
from amp_fx.numerics.audit.report import AuditReport, merged
from amp_fx.numerics.audit.rounding import IntegerRule, LossRule, Roundings, UpcastRule
from amp_fx.numerics.audit.sums import CollectiveRule, GradientRule
from amp_fx.numerics.audit.updates import RunningValueRule, ScalerRule, UpdateRule
from amp_fx.numerics.audit.use_of_regions import LowWeightRule, RegionRule
from amp_fx.numerics.own_casts import regions_of_compiled, with_own_casts
from amp_fx.numerics.running import loss_of
from amp_fx.observe.recorder import Recorder
from amp_fx.observe.state import known_to, leaves_of, modules_of, parameters_of
from amp_fx.observe.step import Step
from amp_fx.progress import working
from amp_fx.regions.state import no_autocast
from amp_fx.second_call import takes_inputs_later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    target, settings = unwrap(step, "amp_fx.audit")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"optimizer={optimizer!r} is not an optimizer of torch.optim")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentTypeError(f"scaler={scaler!r} is not a GradScaler of torch.amp or amp_fx")
    call = with_own_casts(step, target, settings)

    @functools.wraps(target, assigned=("__doc__",), updated=())
    def audit_call(*args: Any, **kwargs: Any) -> AuditReport:
        with working(f"auditing {name_of(target)}"):
            program = Step(target, args, kwargs, held=filter(None, (optimizer, scaler)))
            return _Audit(program, optimizer, scaler).run(call)

    return audit_call


class _Audit:
    """One run of a step under all rules."""

    def __init__(
        self,
        program: Step,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        known = [*known_to(program.function), optimizer, scaler]
        self.program, self.optimizer, self.scaler = program, optimizer, scaler
        self.modules = modules_of(program.function)
        self.optimizers = [v for v in known if isinstance(v, torch.optim.Optimizer)]
        self.scalers = [v for v in known if isinstance(v, torch.amp.GradScaler)]

    def run(self, call: Callable[..., Any]) -> AuditReport:
        """Runs the step, a second time if hooks on saved tensors cannot be used in it."""
        with self.program.undisturbed(is_eager=True):
            try:
                return self._observe(call, counts_saved=True)
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
            self.program.restart()
            return self._observe(call, counts_saved=False)

    def _observe(self, call: Callable[..., Any], *, counts_saved: bool) -> AuditReport:
        program = self.program
        auditor = Auditor()
        recorder = Recorder(program.guard, program.paths, auditor)
        weights = self._weights()
        program.guard.note_inputs([w for w in weights if w.is_leaf])
        updates, roundings = UpdateRule(auditor), Roundings()
        losses = LossRule(roundings)
        auditor.rules += [
            losses,
            ChoiceRule(roundings),
            UpcastRule(roundings),
            IntegerRule(),
            roundings,
            GradientRule(auditor, weights),
            CollectiveRule(auditor),
            RegionRule(auditor),
            LowWeightRule(auditor, parameters_of(*self.optimizers) or weights),
            updates,
            RunningValueRule(auditor, leaf_tensors((program.args, program.kwargs))),
            ScalerRule(auditor, self.scalers),
        ]
        hooks = contextlib.nullcontext() if not counts_saved else _saved_by(auditor)
        torch.clear_autocast_cache()
        try:
            with (
                auditor.regions,
                regions_of_compiled(program.function),
                hooks,
                recorder.observing(),
            ):
                loss = loss_of(program.call(call), None)
                value = None if loss is None else loss.detach().clone()
                auditor.regions.close()
                with no_autocast():
                    self._finish(auditor, loss, updates)
        finally:
            torch.clear_autocast_cache()
        self._count(auditor)
        return AuditReport(
            model=name_of(program.function),
            loss=None if value is None else float(value),
            findings=merged(found for rule in auditor.rules for found in rule.findings()),
            uses=auditor.uses.listed(),
        )

    def _finish(self, auditor: Auditor, loss: torch.Tensor | None, updates: UpdateRule) -> None:
        """Calls the backward and steps the optimizer, if the step has not done so."""
        if not auditor.num_backwards:
            if loss is None or not loss.requires_grad:
                raise UnsupportedError(
                    "the step neither calls backward() nor returns a loss, a floating-point scalar "
                    "that requires gradients: give amp_fx.audit a whole training step"
                )
            if self.optimizer is not None:
                self.optimizer.zero_grad()
            scaled = loss if self.scaler is None else self.scaler.scale(loss)
            torch.autograd.backward(scaled)
        if self.optimizer is None or updates.num_steps:
            return
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _weights(self) -> list[torch.Tensor]:
        """Returns the parameters of the step's modules, and other leaves that it knows."""
        parameters = [p for module in self.modules for p in module.parameters()]
        return list(
            dict.fromkeys(
                [*parameters, *leaves_of(self.program.function), *parameters_of(*self.optimizers)]
            )
        )

    def _count(self, auditor: Auditor) -> None:
        """Counts parameters and buffers by dtype and module."""
        members = [
            (what, tensor)
            for root in self.modules
            for what, tensors in (("parameters", root.parameters()), ("buffers", root.buffers()))
            for tensor in tensors
        ]
        for what, tensor in dict.fromkeys(members):
            auditor.uses.add(what, [tensor], auditor.recorder.places.module_of(tensor))


@contextlib.contextmanager
def _saved_by(auditor: Auditor) -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(auditor.save, lambda tensor: tensor):
        yield
