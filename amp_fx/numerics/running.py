"""Runs a step, forward and backward, under the shadow, and leaves everything as it was."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import AccuracyError
from amp_fx.numerics.float8_products import Float8ShadowMode
from amp_fx.numerics.measures import effect_of, relative
from amp_fx.numerics.places import CallNotes
from amp_fx.numerics.recorder import Recorder
from amp_fx.numerics.records import GradientRecord
from amp_fx.numerics.report import UnexaminedRecord
from amp_fx.numerics.shadow import (
    below_everything,
    is_custom,
    is_tracked,
    number_of,
    tensors_in,
    unwrapped,
)
from amp_fx.numerics.state import guard_of, undisturbed
from amp_fx.torch_private.autocast import DisableAutocast
from amp_fx.torch_private.modes import DisableTorchFunction

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Iterator

    from amp_fx.numerics.entry import Asked
    from amp_fx.numerics.measures import Measures
    from amp_fx.numerics.mode import ShadowMode


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
    names = [mode.names.of(leaf, f"input {index}") for index, leaf in enumerate(leaves)]
    several = zip(names, gradients, strict=True)
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
        record = rounding.record
        record.effect = (record.effect or 0.0) + effect / scale
        record.effect_sq += square / scale**2


def _own_gradients(mode: ShadowMode) -> list[GradientRecord]:
    """Those that the step has computed itself, of leaves that had none before."""
    leaves = [leaf for leaf, before in mode.guard.leaves() if before is None]
    return _compared(mode, leaves, [leaf.grad for leaf in leaves])


def _compare(mode: ShadowMode, name: str, gradient: torch.Tensor) -> GradientRecord:
    with below_everything():
        shadow = mode.shadows.of(gradient.detach()).double()
        low = gradient.detach().double()
        norm = float(torch.linalg.vector_norm(shadow))
        low_norm = float(torch.linalg.vector_norm(low))
        error = float(torch.linalg.vector_norm(low - shadow))
        dot = float((low * shadow).sum())
    is_zero = norm == 0 and low_norm == 0
    return GradientRecord(
        name=name,
        shape=tuple(gradient.shape),
        error=0.0 if error == 0 else error / norm if norm else float("inf"),
        cosine=1.0 if is_zero else dot / (norm * low_norm) if norm * low_norm else 0.0,
        norm=norm,
    )


def run_step(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    asked: Asked,
    dtype: torch.dtype,
    region: Callable[[], contextlib.AbstractContextManager[Any]],
    *,
    is_brief: bool = False,
) -> dict[str, Any]:
    """Runs a step under the shadow, and returns the fields of a report that it measures.

    Args:
        step: The step.
        args: Its arguments.
        kwargs: Its named arguments.
        asked: The arguments of ``accuracy``.
        dtype: The low dtype.
        region: Makes the region of mixed precision that the step runs in.
        is_brief: Whether the run is not repeated, for the sake of its cost.
    """
    guard = guard_of(step)
    with undisturbed(guard) as rewind:
        if not is_brief:
            with region(), CallNotes(), Recorder(guard):
                loss = loss_of(step(*args, **kwargs), asked.loss)
            plain = None if loss is None else float(loss.detach())
            guard.check_float32()
            guard.restore()
            rewind()
        mode = Float8ShadowMode(asked.reference, guard, asked.modules, is_brief=is_brief)
        fields = _shadow_run(mode, functools.partial(step, *args, **kwargs), asked, region)
    if dtype == torch.float16:
        fields["suggested_scale"] = _suggested_scale(mode.exponents, asked.scale)
    if is_brief:
        return fields
    if mode.num_healed:
        return {**fields, "loss": plain}
    return {**fields, "is_repeatable": str(plain) == str(fields["loss"])}  # a NaN equals itself


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
    mode: Float8ShadowMode,
    step: Callable[[], Any],
    asked: Asked,
    region: Callable[[], contextlib.AbstractContextManager[Any]],
) -> dict[str, Any]:
    listen(mode)
    with region(), mode.notes, mode:
        outputs = step()
        loss = loss_of(outputs, asked.loss)
    floats = [t for t in tensors_in(outputs) if t.is_floating_point() and is_tracked(t)]
    if loss is None and not floats:
        raise AccuracyError(
            "the step returns neither a loss nor any floating-point tensor; give loss=, a function "
            "that makes a scalar of what the step returns"
        )
    low, reference, magnitude = _values_of(mode, loss)
    with below_everything():
        compared = floats if loss is None or mode.is_brief else [unwrapped(loss)]
        output_error = _output_error(mode, compared)
    gradients = backward(mode, loss, floats, asked.scale)
    missing = mode.not_examined.items()
    return {
        "nodes": tuple(mode.seen),
        "loss": low,
        "reference_loss": reference,
        "loss_magnitude": magnitude,
        "output_error": output_error,
        "gradients": tuple(gradients),
        "not_examined": tuple(UnexaminedRecord(*place, why) for place, why in missing),
        "is_probed": loss is None,
    }


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


SMALLEST_EXPONENT = -23
"""Of the smallest number of float16, 2**-24, as ``torch.frexp`` has it: in [0.5, 1) * 2**-23."""


def _suggested_scale(
    samples: list[tuple[torch.Tensor, Measures]], scale: float
) -> tuple[float, float] | None:
    """Powers of two between which a float16 backward neither flushes much nor overflows."""
    exponents = [e.cpu().long() for e, _ in samples if e.numel()]
    largest = max((m.max_abs for _, m in samples if math.isfinite(m.max_abs)), default=0.0)
    if not exponents or not largest:
        return None
    weights = [m.numel / e.numel() for e, m in samples if e.numel()]
    counts = torch.zeros(600, dtype=torch.float64)
    for found, weight in zip(exponents, weights, strict=True):
        ones = torch.full(found.shape, weight, dtype=torch.float64)
        counts.scatter_add_(0, (found + 300).clamp(0, 599), ones)
    share = counts.cumsum(0) / counts.sum()
    first = int((share > 0.01).nonzero()[0]) - 300
    low = 2.0 ** max(0, SMALLEST_EXPONENT - first + 1) * scale
    high = 2.0 ** math.floor(math.log2(65504 / 4 / largest)) * scale
    return (low, high) if low <= high else None
