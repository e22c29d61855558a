"""Runs a step, forward and backward, together with its shadow, and restores the state."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import UnsupportedError
from amp_fx.explanation.running import leaf_tensors
from amp_fx.numerics.effects import Effects
from amp_fx.numerics.equality import relative_error
from amp_fx.numerics.records import GradientRecord
from amp_fx.numerics.report import UnexaminedRecord
from amp_fx.numerics.twin import Twin
from amp_fx.observe.ops import below_everything, is_tracked, unwrapped
from amp_fx.observe.places import is_inside
from amp_fx.observe.recorder import Recorder
from amp_fx.observe.step import Step, cotangents
from amp_fx.regions.module_stack import call_with_paths
from amp_fx.torch_private.autocast import DisableAutocast
from amp_fx.torch_private.modes import DisableTorchFunction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amp_fx.numerics.asked import Asked
    from amp_fx.regions.module_paths import ModulePaths


def _run_backward(
    twin: Twin,
    effects: Effects,
    loss: torch.Tensor | None,
    compared: list[torch.Tensor],
    asked: Asked,
) -> list[GradientRecord]:
    """Runs the backward, unless the step did so, and compares the gradients of leaves."""
    outputs = [t for t in ([loss] if loss is not None else compared) if t.requires_grad]
    read = [leaf for leaf, _ in twin.recorder.guard.leaves()]
    known = dict.fromkeys([*read, *outputs])
    leaves = [leaf for leaf in known if leaf.is_leaf and leaf.requires_grad]
    new = [leaf for leaf, before in twin.recorder.guard.leaves() if leaf.grad is not before]
    if effects.roots or any(leaf.grad is not None for leaf in new) or not outputs:
        _divide_effects(twin, _loss_scale(twin, effects, loss))
        return _compared(twin, new, [leaf.grad for leaf in new], asked)
    if not leaves:
        return []
    with DisableTorchFunction(), DisableAutocast():
        directions = cotangents(outputs, asked.scale)
    for output in outputs:
        twin.recorder.begin_backward(output)
    found: Iterable[torch.Tensor | None]
    with twin.recorder:
        if effects.has_reentrant:  # its backward runs another one, and accumulates
            for leaf in leaves:
                leaf.grad = None  # the guard restores it
            torch.autograd.backward(outputs, directions)
            found = [leaf.grad for leaf in leaves]
        else:
            found = torch.autograd.grad(outputs, leaves, directions, allow_unused=True)
    _divide_effects(twin, asked.scale)
    return _compared(twin, leaves, found, asked)


def _compared(
    twin: Twin, leaves: list[torch.Tensor], found: Iterable[torch.Tensor | None], asked: Asked
) -> list[GradientRecord]:
    """Returns a list that gets the records of gradients when their numbers are read."""
    records: list[GradientRecord] = []
    for index, (leaf, gradient) in enumerate(zip(leaves, found, strict=True)):
        name = twin.recorder.places.path_of(leaf, f"input {index}")
        is_wanted = asked.modules is None or is_inside(name, asked.modules)
        if gradient is not None and is_wanted and is_tracked(gradient):
            with below_everything():
                shadow = twin.shadows.of(gradient.detach()).double()
                low = gradient.detach().double()
                norms = [torch.linalg.vector_norm(t) for t in (shadow, low, low - shadow)]
                add = functools.partial(_add_record, records, name, tuple(gradient.shape))
                twin.readings.add([*norms, (low * shadow).sum()], add)
    return records


def _add_record(
    records: list[GradientRecord], name: str, shape: tuple[int, ...], read: list[float]
) -> None:
    norm, low_norm, error, dot = read
    is_zero = norm == 0 and low_norm == 0
    records.append(
        GradientRecord(
            name=name,
            shape=shape,
            error=0.0 if error == 0 else error / norm if norm else math.inf,
            cosine=1.0 if is_zero else dot / (norm * low_norm) if norm * low_norm else 0.0,
            norm=norm,
        )
    )


def _loss_scale(twin: Twin, effects: Effects, loss: torch.Tensor | None) -> float:
    """Returns the factor of the loss in the step's own ``backward``."""
    if loss is None or not effects.roots:
        return 1.0
    with below_everything():
        value = float(twin.shadows.of(loss.detach()))
    return sum(effects.roots) / value if value else math.nan


def _divide_effects(twin: Twin, factor: float) -> None:
    twin.readings.read()
    for seen in twin.seen if math.isfinite(factor) and factor != 0 else ():
        seen.effect = None if seen.effect is None else seen.effect / factor
        seen.effect_sq /= factor**2


def run_step(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    asked: Asked,
    dtype: torch.dtype,
    device_type: str,
) -> dict[str, Any]:
    """Runs a step with its shadow, and returns the measured fields of a report.

    Args:
        step: The step.
        args: Its arguments.
        kwargs: Its named arguments.
        asked: The arguments of ``accuracy``.
        dtype: The low dtype.
        device_type: The device type of the region of mixed precision.
    """
    program = Step(step, args, kwargs)
    guard, paths = program.guard, program.paths

    def forward(recorder: Recorder) -> tuple[Any, torch.Tensor | None]:
        with torch.autocast(device_type, dtype), recorder.observing():
            outputs = program.call(step)
            return outputs, loss_of(outputs, asked.loss)

    with program.undisturbed(is_eager=True):
        plain, bad = _plain_results(*forward(Recorder(guard, paths)))  # its graph is freed here
        guard.check_float32()
        # Where the host need not wait for ops, overflows are found at the end, and then healed.
        for is_batched in (True, False) if device_type not in WAITING else (False,):
            program.restart()
            twin = Twin(asked.modules, is_batched=is_batched)
            effects = Effects(twin)
            Recorder(guard, paths, twin, effects)
            fields = _shadow_run(twin, effects, forward, paths, asked, bad)
            if twin.readings.is_sound:
                break
    if twin.num_healed:
        return {**fields, "loss": plain}
    return {**fields, "is_repeatable": str(plain) == str(fields["loss"])}  # a NaN equals itself


def _plain_results(
    outputs: Any, loss: torch.Tensor | None
) -> tuple[float | None, list[torch.Tensor]]:
    """Returns the loss, and masks of the infinite and NaN elements of the loss or the outputs."""
    with below_everything():
        bad = [~tensor.detach().isfinite() for tensor in _compared_outputs(outputs, loss)]
    return None if loss is None else float(loss.detach()), bad


def _compared_outputs(outputs: Any, loss: torch.Tensor | None) -> list[torch.Tensor]:
    """Returns the loss, or the floating-point outputs of a step without one."""
    found = leaf_tensors(outputs) if loss is None else [unwrapped(loss.detach())]
    return [t for t in found if t.is_floating_point() and is_tracked(t)]


def loss_of(outputs: Any, given: Callable[[Any], Any] | None) -> torch.Tensor | None:
    """Returns the loss: a function of the outputs, or the first output if it is a scalar."""
    if given is not None:
        found = given(outputs)
        if isinstance(found, torch.Tensor) and found.numel() == 1 and found.is_floating_point():
            return found.reshape(())
        what = f"sizes {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        raise UnsupportedError(f"loss=... returns {what}, not a floating-point scalar")
    tensors = leaf_tensors(outputs)
    is_loss = bool(tensors) and tensors[0].dim() == 0 and tensors[0].is_floating_point()
    return tensors[0] if is_loss else None


WAITING = ("cpu",)
"""Device types on which the host computes itself, so that a read takes no time."""

Forward = Callable[[Recorder], tuple[Any, torch.Tensor | None]]
"""Runs the forward of a step under a recorder, and returns its outputs and its loss."""


def _shadow_run(
    twin: Twin,
    effects: Effects,
    forward: Forward,
    paths: ModulePaths,
    asked: Asked,
    bad: list[torch.Tensor],
) -> dict[str, Any]:
    outputs, loss = forward(twin.recorder)
    compared = _compared_outputs(outputs, loss)
    if not compared:
        what = (
            "step returns neither a loss nor any floating-point tensor"
            if loss is None
            else f"loss is a {type(loss).__name__} of several tensors"
        )
        raise UnsupportedError(
            f"the {what}; give loss=, a function that makes a scalar of what the step returns"
        )
    is_whole = asked.modules is None
    with below_everything():
        exact = [twin.shadows.of(output.detach()) for output in compared]
        is_finite = all(reference.isfinite().all() for reference in exact)
        pairs = zip(exact, compared, strict=True)
        values = {
            "loss": None if loss is None else float(compared[0]),
            "reference_loss": None if loss is None or not is_whole else float(exact[0]),
            "output_error": relative_error(pairs) if is_whole and is_finite else math.nan,
            "num_bad_outputs": _num_bad(exact, bad) if is_whole else 0,
        }
    is_probed = loss is None and not effects.roots
    gradients = call_with_paths(paths, _run_backward, twin, effects, loss, compared, asked)
    twin.readings.read()
    missing = twin.not_examined.items()
    return {
        **values,
        "nodes": tuple(twin.seen),
        "gradients": tuple(gradients),
        "not_examined": tuple(UnexaminedRecord(*place, why) for place, why in missing),
        "is_probed": is_probed,
        "roots": paths.root_classes() if paths.has_several_roots else (),
    }


def _num_bad(exact: list[torch.Tensor], bad: list[torch.Tensor]) -> int:
    """Returns the number of bad elements that are finite in the reference."""
    pairs = [pair for pair in zip(exact, bad, strict=False) if pair[0].shape == pair[1].shape]
    return sum(int((mask & reference.isfinite()).sum()) for reference, mask in pairs)
