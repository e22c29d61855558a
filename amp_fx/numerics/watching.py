"""``amp_fx.watch``: every so many steps of a training, a look at what low precision does.

The step itself is left alone. In a step that is looked at, the model's inputs are kept until the
gradients of its outputs arrive; with these the model is run once more under the shadow, so that
errors, overflows and flushed gradients are those of this very step. In between, a hook counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import AmpFxError, CompileTargetError, OptionError
from amp_fx.numerics.entry import Asked, asked_for, examine
from amp_fx.numerics.records import number, share
from amp_fx.numerics.shadow import random_state, tensors_in, unseen_writes
from amp_fx.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.numerics.report import AccuracyReport

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WatchLine:
    """The measurements of one step.

    Attributes:
        step: The number of the model's call in training, from 0.
        report: All of it.
    """

    step: int
    report: AccuracyReport

    @property
    def overflows(self) -> int:
        """Elements that overflow, in the forward and in the backward."""
        return sum(n.overflows - n.fills + n.singular for n in self.report.nodes)

    @property
    def largest(self) -> tuple[tuple[str, float], ...]:
        """The three ops that do most to the loss, with the root mean square of their effects."""
        sums: dict[str, float] = {}
        for node in self.report.nodes:
            if node.effect is not None:
                name = f"{node.module}: {node.label}" if node.module else node.label
                sums[name] = math.hypot(sums.get(name, 0.0), node.effect_rms)
        ranked = sorted(sums.items(), key=lambda item: -item[1])
        return tuple(ranked[:3])

    def __str__(self) -> str:
        """One line."""
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
    """Looks at a model as ``amp_fx.watch`` says; ``remove`` ends it.

    Attributes:
        lines: What was seen so far, the latest last; at most a hundred.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        target: Callable[..., Any],
        every: int,
        asked: Asked,
        write: _Writers,
    ) -> None:
        self.lines: list[WatchLine] = []
        self._target = target
        self._every = every
        self._asked = asked
        self._write = write
        self._step = -1
        self._is_looking = False
        self._kept: _Kept | None = None
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._kept = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _before(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_looking or not model.training or not torch.is_grad_enabled():
            return
        self._step += 1
        self._kept = None
        if self._step % self._every == 0:
            copies = pytree.tree_map_only(
                torch.Tensor, lambda t: t.detach().clone(), (args, kwargs)
            )
            devices = {tensor.device for tensor in tensors_in(copies)}
            buffers = [(b, b.detach().clone()) for b in model.buffers()]
            self._kept = _Kept(self._step, copies[0], copies[1], devices, buffers)

    def _after(self, _: torch.nn.Module, __: Any, outputs: Any) -> None:
        kept = self._kept
        if kept is None or self._is_looking:
            return
        kept.outputs = [t for t in tensors_in(outputs) if t.requires_grad]
        if kept.outputs:
            kept.gradients = [None] * len(kept.outputs)
            torch.autograd.graph.register_multi_grad_hook(kept.outputs, self._arrived(kept))

    def _arrived(self, kept: _Kept) -> Callable[[Any], None]:
        def arrived(gradients: Any) -> None:
            if self._kept is not kept:
                return
            self._kept, kept.outputs = None, []
            self._is_looking = True
            try:
                line = self._look(kept, list(gradients))
            except (AmpFxError, RuntimeError) as error:
                log.warning("step %d could not be examined: %s", kept.step, error)
                return
            finally:
                self._is_looking = False
            self.lines = [*self.lines[-99:], line]
            self._write(line)

        return arrived

    def _look(self, kept: _Kept, gradients: list[torch.Tensor | None]) -> WatchLine:
        def loss(outputs: Any) -> torch.Tensor:
            outs = [t for t in tensors_in(outputs) if t.requires_grad]
            pairs = [(t, g) for t, g in zip(outs, gradients, strict=False) if g is not None]
            return sum((t.float() * g.detach().float()).sum() for t, g in pairs)  # type: ignore[return-value]

        asked = dataclasses.replace(self._asked, loss=loss)
        with torch.enable_grad(), kept.restored():
            report = examine(self._target, asked, kept.args, kept.kwargs, is_brief=True)
        return WatchLine(kept.step, report)


@dataclasses.dataclass
class _Kept:
    """The inputs that a step needs to be run once more."""

    step: int
    args: Any
    kwargs: Any
    devices: set[torch.device]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[torch.Tensor | None] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.rewind = _random_states(self.devices)

    @contextlib.contextmanager
    def restored(self) -> Any:
        """Buffers and random numbers as they were before the forward, for a while."""
        go_on = _random_states(self.devices)
        buffers = [buffer for buffer, _ in self.buffers]
        later = [buffer.detach().clone() for buffer in buffers]
        with unseen_writes(buffers):
            _write(buffers, [before for _, before in self.buffers])
            self.rewind()
            try:
                yield
            finally:
                go_on()
                _write(buffers, later)


def _write(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


def _random_states(devices: set[torch.device]) -> Callable[[], None]:
    """Takes the states of the random numbers of devices; call what is returned to go back."""
    having = (d for d in devices if hasattr(getattr(torch, d.type, None), "get_rng_state"))
    states = [random_state(device) for device in {torch.device("cpu"), *having}]

    def go_back() -> None:
        for each in states:
            each()

    return go_back


class _Writers:
    """The writers that get lines."""

    def __init__(self, to: Callable[[WatchLine], Any] | None, writer: Any) -> None:
        self._to, self._writer = to, writer

    def __call__(self, line: WatchLine) -> None:
        """Writes a line everywhere."""
        log.info("%s", line)
        if self._to is not None:
            self._to(line)
        if self._writer is None:
            return
        report = line.report
        scalars = {
            "error": report.output_error,
            "overflows": float(line.overflows),
            "flushed_gradients": report.flushed_gradients,
        }
        if report.suggested_scale is not None:
            scalars["suggested_scale"] = report.suggested_scale[1]
        for name, value in scalars.items():
            self._writer.add_scalar(f"amp_fx/{name}", value, line.step)
        self._writer.add_text("amp_fx/line", str(line), line.step)


def watch(
    model: torch.nn.Module,
    *,
    every: int = 100,
    to: Callable[[WatchLine], Any] | None = None,
    writer: Any = None,
    dtype: torch.dtype | str | None = None,
    policy: Any = None,
) -> Watch:
    """Looks at a model every so many steps of its training, and writes a line each time.

    A line says how far the outputs are off, what overflows, which ops do most to the loss, how
    much of the gradients is flushed to zero, and which scale of the loss would do. Gradients are
    those that arrive in the step: with a gradient scaler, scaled ones, so that a suggested scale
    is what to multiply the present one with. Steps that are looked at take about ten times as
    long; the others, a call of two hooks.

    Args:
        model: What the training calls: for a compiled model the compiled one, as hooks on what
            is inside of it would be compiled too. Calls in eval mode or without gradients are
            not counted.
        every: The steps from one look to the next; the first step is looked at.
        to: Called with each ``WatchLine``. Every line is logged as well (INFO).
        writer: A TensorBoard ``SummaryWriter``, or what has its ``add_scalar`` and ``add_text``.
        dtype: As in ``amp_fx.accuracy``.
        policy: As in ``amp_fx.accuracy``.

    Returns:
        The watch: its ``remove`` ends it, and it is a context manager.

    Raises:
        OptionError: An option has a value that is not allowed.
        CompileTargetError: The model is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise CompileTargetError(f"amp_fx.watch takes a module, not {model!r}")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise OptionError(f"every={every!r} is not a number of steps")
    if to is not None and not callable(to):
        raise OptionError(f"to={to!r} cannot be called")
    if writer is not None and not hasattr(writer, "add_scalar"):
        raise OptionError(f"writer={writer!r} has no add_scalar, as TensorBoard's SummaryWriter")
    target, asked = asked_for(model, "amp_fx.watch", dtype, policy)
    return Watch(model, target, every, asked, _Writers(to, writer))
