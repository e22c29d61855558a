"""The backward under the shadow: gradients meet the errors of the forward, and are compared."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.numerics.measures import effect_of
from amp_fx.numerics.records import GradientRecord
from amp_fx.numerics.repeat import below_everything
from amp_fx.numerics.shadow import is_tracked
from amp_fx.numerics.torch_private import is_custom, number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from amp_fx.numerics.mode import ShadowMode


def backward(
    mode: ShadowMode,
    loss: torch.Tensor | None,
    floats: list[torch.Tensor],
    scale: float,
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
    with torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
        directions = [_direction(t, scale, is_loss=loss is not None) for t in outputs]
    if any(node.name() in _REENTRANT for node in _nodes_above(outputs)):
        return _reentrant_gradients(mode, outputs, directions)
    with mode:
        found = torch.autograd.grad(outputs, leaves, directions, allow_unused=True)
    return _compared(mode, leaves, found)


def listen(mode: ShadowMode) -> None:
    """Has gradients meet errors in a backward that the step runs itself, by ``Tensor.backward``."""

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
    mode: ShadowMode,
    leaves: list[torch.Tensor],
    gradients: Iterable[torch.Tensor | None],
) -> list[GradientRecord]:
    several = zip(_names(mode, leaves), gradients, strict=True)
    return [_compare(mode, n, g) for n, g in several if g is not None and is_tracked(g)]


def _direction(output: torch.Tensor, scale: float, *, is_loss: bool) -> torch.Tensor:
    """What the backward begins with: the scale, or signs by chance for outputs without a loss."""
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
        nodes[number_of(node)] = node
        if is_custom(node) and node.name() not in _PASSING:
            module = mode.site_of(number_of(node)).module
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
        mode.is_paused = True
        try:
            with below_everything():
                for position, gradient in enumerate(gradients):
                    if gradient is not None and is_tracked(gradient):
                        _meet(mode, roundings, position, gradient, scale)
        finally:
            mode.is_paused = False

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
