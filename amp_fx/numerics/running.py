"""Runs a step, forward and backward, under the shadow, and leaves everything as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import AccuracyError
from amp_fx.numerics.gradients import backward, listen
from amp_fx.numerics.measures import relative
from amp_fx.numerics.mode import ShadowMode
from amp_fx.numerics.places import CallNotes
from amp_fx.numerics.repeat import below_everything, python_random_state, tensors_in
from amp_fx.numerics.shadow import is_tracked, unwrapped
from amp_fx.numerics.state import GuardMode, StateGuard, guard_of
from amp_fx.reports import human

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amp_fx.numerics.records import GradientRecord
    from amp_fx.numerics.seen import Seen

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Request:
    """What ``accuracy`` was asked for.

    Attributes:
        region: Makes the region of mixed precision that the step runs in.
        reference: The dtype of the reference.
        scale: What the loss is multiplied with.
        loss: Gives the loss of what the step gives; None takes that itself.
        modules: Patterns of modules to measure; None measures all.
        is_brief: Whether the run is not repeated, for the sake of its cost.
    """

    region: Callable[[], contextlib.AbstractContextManager[Any]]
    reference: torch.dtype = torch.float32
    scale: float = 1.0
    loss: Callable[[Any], Any] | None = None
    modules: tuple[str, ...] | None = None
    is_brief: bool = False


@dataclasses.dataclass
class Run:
    """What one run under the shadow gave.

    Attributes:
        seen: The ops, in order.
        low_loss: The loss of the low program; None without a loss.
        reference_loss: That of the reference program.
        loss_magnitude: How large that is, or the largest of what it is a sum or mean of.
        output_error: Relative error of all outputs together.
        gradients: Those of leaves.
        not_examined: Ops that could not be, with their modules and the reasons.
        is_probed: Whether a random direction of the outputs stands for a loss.
        is_repeatable: Whether two runs gave the same loss; None if there was one only.
        predicted_bytes: Memory of shadows and errors at the end of the forward, as foretold.
        num_bytes: The same, as it was.
    """

    seen: list[Seen]
    low_loss: float | None
    reference_loss: float | None
    loss_magnitude: float | None
    output_error: float
    gradients: list[GradientRecord]
    not_examined: dict[tuple[str, str], str]
    is_probed: bool
    is_repeatable: bool | None
    predicted_bytes: int
    num_bytes: int


def run_step(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], request: Request
) -> Run:
    """Runs a step under the shadow."""
    guard = guard_of(step)
    with undisturbed(guard) as rewind:
        plain = None if request.is_brief else _plain_run(step, args, kwargs, request, guard, rewind)
        if plain is not None:
            guard.refuse_other_dtypes()
            log.info("examining takes about %s more memory", human(plain.num_bytes))
            guard.restore()
            rewind()
        return _shadow_run(step, args, kwargs, request, guard, plain)


@contextlib.contextmanager
def undisturbed(guard: StateGuard, *, is_eager: bool = True) -> Iterator[Callable[[], None]]:
    """Puts everything back in the end; gives what sets random numbers back at once.

    What was compiled runs eagerly inside, so that every op is seen and Dynamo compiles nothing,
    unless it is told otherwise.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices):
        cpu = torch.get_rng_state()
        others = torch.cuda.get_rng_state_all() if devices else []
        rewind_python = python_random_state()

        def rewind() -> None:
            torch.set_rng_state(cpu)
            if others:
                torch.cuda.set_rng_state_all(others)
            rewind_python()

        try:
            with torch.compiler.set_stance("force_eager" if is_eager else "default"):
                yield rewind
        finally:
            guard.restore()
            rewind_python()


@dataclasses.dataclass
class _Plain:
    """What running the step as it is gave."""

    loss: float | None
    num_bytes: int


def _plain_run(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    guard: StateGuard,
    rewind: Callable[[], None],
) -> _Plain:
    """Runs the step as it is; without a count of memory inside of ``torch.func``."""
    mode = GuardMode(guard, request.reference)
    try:
        with request.region(), mode.counting_saved(), CallNotes(), mode:
            loss = loss_of(step(*args, **kwargs), request.loss)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        guard.restore()
        rewind()
        with request.region(), CallNotes(), mode:
            loss = loss_of(step(*args, **kwargs), request.loss)
    return _Plain(None if loss is None else float(loss.detach()), mode.num_bytes)


def loss_of(outputs: Any, given: Callable[[Any], Any] | None) -> torch.Tensor | None:
    """The loss: what a function makes of the outputs, or the first of them if it is a scalar."""
    if given is not None:
        found = given(outputs)
        if isinstance(found, torch.Tensor) and found.numel() == 1 and found.is_floating_point():
            return found.reshape(())
        what = f"sizes {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        raise AccuracyError(f"loss=... returns {what}, not a floating-point scalar")
    tensors = tensors_in(outputs)
    is_loss = bool(tensors) and tensors[0].dim() == 0 and tensors[0].is_floating_point()
    return tensors[0] if is_loss else None


def _shadow_run(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    guard: StateGuard,
    plain: _Plain | None,
) -> Run:
    mode = ShadowMode(request.reference, guard, request.modules, is_brief=request.is_brief)
    listen(mode)
    with request.region(), mode.notes, mode:
        outputs = step(*args, **kwargs)
        loss = loss_of(outputs, request.loss)
    floats = _float_outputs(outputs)
    if loss is None and not floats:
        raise AccuracyError(
            "the step returns neither a loss nor any floating-point tensor; give loss=, a function "
            "that makes a scalar of what the step returns"
        )
    roundings = [r for several in mode.roundings.values() for r in several]
    num_bytes = mode.shadows.num_bytes() + sum(r.eps.nbytes for r in roundings)
    low, reference, magnitude = _values_of(mode, loss)
    with below_everything():
        compared = floats if loss is None or request.is_brief else [unwrapped(loss)]
        output_error = _output_error(mode, compared)
    gradients = backward(mode, loss, floats, request.scale)
    is_same = None if plain is None or mode.num_healed else _is_same(plain.loss, low)
    return Run(
        seen=mode.seen,
        low_loss=plain.loss if plain is not None and mode.num_healed else low,
        reference_loss=reference,
        loss_magnitude=magnitude,
        output_error=output_error,
        gradients=gradients,
        not_examined=mode.not_examined,
        is_probed=loss is None,
        is_repeatable=is_same,
        predicted_bytes=plain.num_bytes if plain is not None else 0,
        num_bytes=num_bytes,
    )


def _is_same(one: float | None, other: float | None) -> bool:
    return one == other or (one != one and other != other)


def _float_outputs(outputs: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in(outputs) if t.is_floating_point() and is_tracked(t)]


def _values_of(
    mode: ShadowMode, loss: torch.Tensor | None
) -> tuple[float | None, float | None, float | None]:
    if loss is None:
        return None, None, None
    plain = unwrapped(loss.detach())
    if not is_tracked(plain):
        raise AccuracyError(
            f"the loss is a {type(loss).__name__} of several tensors; give loss=, a function that "
            "makes a plain tensor of what the step returns"
        )
    with below_everything():
        return float(plain), float(mode.shadows.of(plain)), mode.magnitude_of(plain)


def _output_error(mode: ShadowMode, outputs: list[torch.Tensor]) -> float:
    error = reference = 0.0
    for output in outputs:
        shadow = mode.shadows.of(output.detach()).double()
        error += float(torch.sub(output.detach(), shadow).square().sum())
        reference += float(shadow.square().sum())
    return relative(error, reference)
