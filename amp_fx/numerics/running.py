"""Runs a step, forward and backward, under the shadow, and leaves everything as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import AccuracyError
from amp_fx.numerics.float8_products import Float8ShadowMode
from amp_fx.numerics.measures import effect_of, relative
from amp_fx.numerics.places import CallNotes
from amp_fx.numerics.recorder import Recorder
from amp_fx.numerics.records import GradientRecord
from amp_fx.numerics.shadow import (
    below_everything,
    is_custom,
    is_tracked,
    number_of,
    python_random_state,
    tensors_in,
    unwrapped,
)
from amp_fx.numerics.state import StateGuard, guard_of
from amp_fx.torch_private.autocast import DisableAutocast
from amp_fx.torch_private.modes import DisableTorchFunction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from amp_fx.numerics.mode import ShadowMode
    from amp_fx.numerics.records import Seen


def backward(
    mode: ShadowMode, loss: torch.Tensor | None, floats: list[torch.Tensor], scale: float
) -> list[GradientRecord]:
    """Runs the backward, if the step has not, and compares the gradients of leaves."""
    outputs = [t for t in ([loss] if loss is not None else floats) if t.requires_grad]
    own = _own_gradients(mode)
    if mode.roots or own or not outputs:
        _rescale(mode, loss)
        return own
    leaves = _prepare(mode, outputs, scale)
    if not leaves:
        return []
    with DisableTorchFunction(), DisableAutocast():
        directions = [_direction(t, scale, is_loss=loss is not None) for t in outputs]
    if any(node.name() in _REENTRANT for node in _nodes_above(outputs)):
        return _reentrant_gradients(mode, outputs, directions)
    with mode:
        found = torch.autograd.grad(outputs, leaves, directions, allow_unused=True)
    return _compared(mode, leaves, found)


def listen(mode: ShadowMode) -> None:
    """Prepares the shadows of gradients where the step runs its backward itself."""

    def begins(root: torch.Tensor) -> None:
        if not isinstance(root, torch.Tensor) or not root.requires_grad or not is_tracked(root):
            return
        with below_everything():
            mode.roots.append(float(mode.shadows.of(root.detach()).sum()))
        _prepare(mode, [root], 1.0)

    mode.notes.on_backward = begins


def _rescale(mode: ShadowMode, loss: torch.Tensor | None) -> None:
    """Takes out of effects what the step has multiplied its loss with, such as a scaler's scale."""
    if loss is None or not mode.roots:
        return
    with below_everything():
        value = float(mode.shadows.of(loss.detach()))
    factor = sum(mode.roots) / value if value else math.nan
    for seen in mode.seen if math.isfinite(factor) and factor else ():
        seen.effect = None if seen.effect is None else seen.effect / factor
        seen.effect_sq /= factor**2


_REENTRANT = ("CheckpointFunctionBackward",)
"""Functions whose backward runs another one, so that leaves below are not known before."""


def _reentrant_gradients(
    mode: ShadowMode, outputs: list[torch.Tensor], directions: list[torch.Tensor]
) -> list[GradientRecord]:
    """Those that a backward leaves in leaves, whose own ones are put back in the end."""
    leaves = [leaf for leaf, _ in mode.guard.leaves()]
    for leaf in leaves:
        leaf.grad = None
    with mode:
        torch.autograd.backward(outputs, directions)
    return _compared(mode, leaves, [leaf.grad for leaf in leaves])


def _compared(
    mode: ShadowMode, leaves: list[torch.Tensor], gradients: Iterable[torch.Tensor | None]
) -> list[GradientRecord]:
    several = zip(_names(mode, leaves), gradients, strict=True)
    return [_compare(mode, n, g) for n, g in several if g is not None and is_tracked(g)]


def _direction(output: torch.Tensor, scale: float, *, is_loss: bool) -> torch.Tensor:
    """Returns the gradient of the outputs: the scale, or random signs without a loss."""
    if is_loss:
        return torch.full_like(output, scale)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
    return (signs * scale).to(output.device, output.dtype)


def _prepare(mode: ShadowMode, outputs: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """Sees to it that gradients meet the errors; returns the leaves of the graph."""
    leaves = [t for t in outputs if t.grad_fn is None]
    nodes: dict[int, Any] = {}
    for node in _nodes_above(outputs):
        leaf = getattr(node, "variable", None)
        if leaf is not None and not node.next_functions:
            leaves.append(leaf)
            continue
        number = number_of(node)
        nodes[number] = node
        is_measured = node.name() in _PASSING or number in mode.measured_nodes
        if is_custom(node) and not is_measured:
            module = mode.site_of(number).module
            why = "what ops inside of a custom function do to the loss is not known"
            mode.leave_out(node.name().removesuffix("Backward"), module, why)
    for number, roundings in mode.roundings.items():
        found = nodes.get(number)
        if found is None and roundings[0].is_written:
            found = _node_of_write(nodes, number, is_view=roundings[0].geometry is not None)
        if found is not None:
            found.register_prehook(_hook(mode, roundings, scale))
    return leaves


_PASSING = ("BackwardHookFunctionBackward",)
"""Custom functions of torch that only pass on what they are given, for the sake of hooks."""


def _nodes_above(outputs: list[torch.Tensor]) -> Iterator[Any]:
    """The nodes of autograd that outputs depend on."""
    pending: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    known = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                pending.append(following)


def _node_of_write(nodes: dict[int, Any], number: int, *, is_view: bool) -> Any:
    """The node of an op that writes in place, which is not the latest when the op runs.

    Relies on autograd keeping a copy of what is overwritten, whose node comes after the op's, and
    on a write to a view being a ``CopySlices`` of its base, whose node is made after the write.
    """
    if is_view:
        found = nodes.get(number + 1)
        return found if found is not None and found.name().endswith("CopySlices") else None
    return nodes.get(number - 1)


def _hook(mode: ShadowMode, roundings: list[Any], scale: float) -> Callable[[Any], None]:
    def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
        with mode.paused(), below_everything():
            for position, gradient in enumerate(gradients):
                if gradient is not None and is_tracked(gradient):
                    _meet(mode, roundings, position, gradient, scale)

    return hook


def _meet(
    mode: ShadowMode, roundings: list[Any], position: int, gradient: torch.Tensor, scale: float
) -> None:
    for rounding in roundings:
        if rounding.position != position and rounding.geometry is None:
            continue
        low = rounding.part_of(gradient)
        shadow = rounding.part_of(mode.shadows.of(gradient))
        if low is None or shadow is None:
            continue
        if mode.shadows.of(gradient) is gradient:
            low = shadow
        effect, square = effect_of(low, shadow, rounding.eps)
        if not math.isfinite(effect) or not math.isfinite(square):
            continue  # where something overflowed there is no first order
        seen = rounding.seen
        seen.effect = (seen.effect or 0.0) + effect / scale
        seen.effect_sq += square / scale**2


def _own_gradients(mode: ShadowMode) -> list[GradientRecord]:
    """Those that the step has computed itself, of leaves that had none before."""
    leaves = [leaf for leaf, before in mode.guard.leaves() if before is None]
    return _compared(mode, leaves, [leaf.grad for leaf in leaves])


def _names(mode: ShadowMode, leaves: list[torch.Tensor]) -> list[str]:
    known: dict[int, str] = {}
    for prefix, root in mode.places.roots.values():
        for name, parameter in root.named_parameters():
            known.setdefault(id(parameter), f"{prefix}.{name}" if prefix else name)
    return [known.get(id(leaf), f"input {index}") for index, leaf in enumerate(leaves)]


def _compare(mode: ShadowMode, name: str, gradient: torch.Tensor) -> GradientRecord:
    with below_everything():
        shadow = mode.shadows.of(gradient.detach()).double()
        low = gradient.detach().double()
        norm = float(torch.linalg.vector_norm(shadow))
        low_norm = float(torch.linalg.vector_norm(low))
        error = float(torch.linalg.vector_norm(low - shadow))
        dot = float((low * shadow).sum())
        nonzero = int(torch.count_nonzero(shadow))
        flushed = int(((low == 0) & (shadow != 0)).sum())
        max_abs = float(shadow.abs().max()) if shadow.numel() else 0.0
    is_zero = norm == 0 and low_norm == 0
    return GradientRecord(
        name=name,
        shape=tuple(gradient.shape),
        error=0.0 if error == 0 else error / norm if norm else float("inf"),
        cosine=1.0 if is_zero else dot / (norm * low_norm) if norm * low_norm else 0.0,
        flushed=flushed / nonzero if nonzero else 0.0,
        max_abs=max_abs,
        norm=norm,
    )


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of ``accuracy``.

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
    """The outcome of one run under the shadow.

    Attributes:
        seen: The ops, in order.
        low_loss: The loss of the low program; None without a loss.
        reference_loss: That of the reference program.
        loss_magnitude: How large that is, or the largest of what it is a sum or mean of.
        output_error: Relative error of all outputs together.
        gradients: Those of leaves.
        not_examined: Ops that could not be, with their modules and the reasons.
        is_probed: Whether a random direction of the outputs stands for a loss.
        num_healed: How many results overflowed, and were repaired.
        is_repeatable: Whether two runs gave the same loss; None if there was one only.
    """

    seen: list[Seen]
    low_loss: float | None
    reference_loss: float | None
    loss_magnitude: float | None
    output_error: float
    gradients: list[GradientRecord]
    not_examined: dict[tuple[str, str], str]
    is_probed: bool
    num_healed: int
    is_repeatable: bool | None = None


def run_step(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], request: Request
) -> Run:
    """Runs a step under the shadow."""
    guard = guard_of(step)
    with undisturbed(guard) as rewind:
        if request.is_brief:
            return _shadow_run(step, args, kwargs, request, guard)
        with request.region(), CallNotes(), Recorder(guard):
            loss = loss_of(step(*args, **kwargs), request.loss)
        plain = None if loss is None else float(loss.detach())
        guard.refuse_other_dtypes()
        guard.restore()
        rewind()
        run = _shadow_run(step, args, kwargs, request, guard)
    if run.num_healed:
        run.low_loss = plain
    else:
        run.is_repeatable = str(plain) == str(run.low_loss)  # a NaN is equal to itself
    return run


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


def caller_of(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a caller of a step with which a module's paths begin at the module."""
    return step.__call__ if isinstance(step, torch.nn.Module) else step


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
) -> Run:
    mode = Float8ShadowMode(request.reference, guard, request.modules, is_brief=request.is_brief)
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
    low, reference, magnitude = _values_of(mode, loss)
    with below_everything():
        compared = floats if loss is None or request.is_brief else [unwrapped(loss)]
        output_error = _output_error(mode, compared)
    gradients = backward(mode, loss, floats, request.scale)
    return Run(
        seen=mode.seen,
        low_loss=low,
        reference_loss=reference,
        loss_magnitude=magnitude,
        output_error=output_error,
        gradients=gradients,
        not_examined=mode.not_examined,
        is_probed=loss is None,
        num_healed=mode.num_healed,
    )


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
