"""``amp_fx.watch``: examines every n-th step of a training.

Hooks keep the inputs of such a step until the gradients of the outputs arrive. Then the model runs
once more under ``amp_fx.accuracy``, with these inputs and gradients, so that errors, overflows and
flushed gradients are those of this step.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import AmpFxError, CompileTargetError, OptionError
from amp_fx.explanation.running import leaf_tensors
from amp_fx.numerics.entry import asked_for, check_number, examine
from amp_fx.numerics.records import number, share
from amp_fx.numerics.trial import detached
from amp_fx.random_states import random_states
from amp_fx.torch_private.autograd import preserve_version_counters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amp_fx.numerics.report import AccuracyReport

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WatchLine:
    """The measurements of one step.

    Attributes:
        step: The number of the model's call in training, from 0.
        report: The report on it.
    """

    step: int
    report: AccuracyReport

    @property
    def overflows(self) -> int:
        """The number of elements that overflow, in the forward and in the backward."""
        return sum(n.overflows - n.fills + n.singular for n in self.report.nodes)

    @property
    def largest(self) -> tuple[tuple[str, float], ...]:
        """The three ops that change the loss most, with the root mean square of their effects."""
        sums: dict[str, float] = {}
        for node in self.report.nodes:
            if node.effect is not None:
                name = f"{node.module}: {node.label}" if node.module else node.label
                sums[name] = math.hypot(sums.get(name, 0.0), node.effect_rms)
        ranked = sorted(sums.items(), key=lambda item: -item[1])
        return tuple(ranked[:3])

    @property
    def scalars(self) -> dict[str, float]:
        """The numbers for TensorBoard, by name."""
        report = self.report
        scalars = {
            "error": report.output_error,
            "overflows": float(self.overflows),
            "flushed_gradients": report.flushed_gradients,
        }
        scale = report.suggested_scale
        return scalars if scale is None else {**scalars, "suggested_scale": scale[1]}

    def __str__(self) -> str:
        """Returns one line."""
        report = self.report
        parts = [f"step {self.step}: error of the outputs {number(report.output_error)}"]
        if self.overflows:
            first = next(n for n in report.nodes if n.is_overflow)
            where = f"{first.module}: " if first.module else ""
            parts.append(f"{self.overflows} overflows, first {where}{first.label} ({first.stage})")
        if self.largest:
            parts.append("most by " + ", ".join(f"{n} {number(v)}" for n, v in self.largest))
        if report.dtype == "float16":
            parts.append(f"{share(report.flushed_gradients)} of gradients flushed")
            if report.suggested_scale is not None:
                low, high = report.suggested_scale
                parts.append(f"scale {low:g} to {high:g}")
        return "; ".join(parts)


class Watch:
    """Watches the training of a model; ``remove`` ends it.

    Attributes:
        lines: The lines so far, the latest last; at most a hundred.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        every: int,
        examine_call: Callable[..., AccuracyReport],
        write: Callable[[WatchLine], Any],
    ) -> None:
        self.lines: list[WatchLine] = []
        self._every = every
        self._examine = examine_call
        self._write = write
        self._step = -1
        self._is_examining = False
        self._watched: _WatchedStep | None = None
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        """Removes the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _before(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_examining or not model.training or not torch.is_grad_enabled():
            return
        self._step += 1
        self._watched = None
        if self._step % self._every == 0:
            self._watched = _WatchedStep(self._step, detached((args, kwargs)), [*model.buffers()])

    def _after(self, _: torch.nn.Module, __: Any, outputs: Any) -> None:
        watched = self._watched
        if watched is None or self._is_examining:
            return
        differentiable = [t for t in leaf_tensors(outputs) if t.requires_grad]
        if not differentiable:
            return

        def arrived(gradients: Any) -> None:
            if self._watched is not watched:
                return
            self._watched, self._is_examining = None, True
            try:
                line = WatchLine(watched.number, watched.examined(self._examine, gradients))
            except (AmpFxError, RuntimeError) as error:
                log.warning("step %d could not be examined: %s", watched.number, error)
                return
            finally:
                self._is_examining = False
            self.lines = [*self.lines[-99:], line]
            self._write(line)

        torch.autograd.graph.register_multi_grad_hook(differentiable, arrived)


@dataclasses.dataclass
class _WatchedStep:
    """The inputs and the state with which the model runs once more."""

    number: int
    inputs: tuple[Any, Any]
    buffers: list[torch.Tensor]

    def __post_init__(self) -> None:
        self.before = detached(self.buffers)
        self.rewind = random_states("cuda", "xpu")

    def examined(
        self, examine_call: Callable[..., AccuracyReport], gradients: Sequence[torch.Tensor | None]
    ) -> AccuracyReport:
        """Returns the report on the step, with buffers and random numbers as before the forward."""

        def loss(outputs: Any) -> torch.Tensor:
            outs = [t for t in leaf_tensors(outputs) if t.requires_grad]
            pairs = [(t, g) for t, g in zip(outs, gradients, strict=False) if g is not None]
            return sum((t.float() * g.detach().float()).sum() for t, g in pairs)  # type: ignore[return-value]

        after, restore_random_states = detached(self.buffers), random_states("cuda", "xpu")
        with preserve_version_counters(tuple(self.buffers)):
            _copy(self.buffers, self.before)
            self.rewind()
            try:
                with torch.enable_grad():
                    return examine_call(loss, *self.inputs)
            finally:
                restore_random_states()
                _copy(self.buffers, after)


def _copy(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


def watch(
    model: torch.nn.Module,
    *,
    every: int = 100,
    to: Callable[[WatchLine], Any] | None = None,
    writer: Any = None,
    dtype: torch.dtype | str | None = None,
    policy: Any = None,
) -> Watch:
    """Examines every n-th step of a model's training, and writes a line each time.

    A line has the error of the outputs, the overflows, the ops that change the loss most, the share
    of the gradients that is flushed to zero, and the scales of the loss that prevent that.
    Gradients are those of the step. With a gradient scaler they are scaled, so multiply the present
    scale with the suggested one. Examined steps take about ten times as long; the others call two
    hooks.

    Args:
        model: The model that the training calls. If it is compiled, the compiled model: hooks on
            the original model would be compiled with it. Calls in eval mode or without gradients
            are not counted.
        every: The number of steps from one line to the next. The first step is examined.
        to: A function that is called with each ``WatchLine``. Each line is also logged (INFO).
        writer: A TensorBoard ``SummaryWriter``, or an object with its ``add_scalar`` and
            ``add_text``.
        dtype: See ``amp_fx.accuracy``.
        policy: See ``amp_fx.accuracy``.

    Returns:
        The watch, a context manager. Its ``remove`` ends it.

    Raises:
        OptionError: An option has an invalid value.
        CompileTargetError: The model is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise CompileTargetError(f"amp_fx.watch takes a module, not {model!r}")
    check_number("every", every, "a number of steps", least=1, is_whole=True)
    if to is not None and not callable(to):
        raise OptionError(f"to={to!r} cannot be called")
    if writer is not None and not hasattr(writer, "add_scalar"):
        raise OptionError(f"writer={writer!r} has no add_scalar, as TensorBoard's SummaryWriter")
    target, asked = asked_for(model, "amp_fx.watch", dtype, policy)

    def examine_call(loss: Callable[[Any], torch.Tensor], args: Any, kwargs: Any) -> AccuracyReport:
        return examine(target, dataclasses.replace(asked, loss=loss), args, kwargs, is_brief=True)

    def write(line: WatchLine) -> None:
        log.info("%s", line)
        if to is not None:
            to(line)
        if writer is not None:
            for name, value in line.scalars.items():
                writer.add_scalar(f"amp_fx/{name}", value, line.step)
            writer.add_text("amp_fx/line", str(line), line.step)

    return Watch(model, every, examine_call, write)
