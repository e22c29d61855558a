"""Compiled steps of an optimizer, without a scaler; ``scaler.py`` adds those with one."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import ScalerTypeError
from amp_fx.grad_scaler import arguments
from amp_fx.grad_scaler.gradients import clip_, grads_of, params_of
from amp_fx.grad_scaler.two_pass import (
    count_step,
    flat,
    measure_of,
    numbers_of,
    split,
    stacked,
    update_of,
    work_of,
    write_copies,
)
from amp_fx.torch_private.optimizers import mark_static, mark_stepped, with_own_code
from amp_fx.weights.step_copies import StepCopies

if TYPE_CHECKING:
    from torch import Tensor

    from amp_fx.grad_scaler.two_pass import Work


class PlainStep:
    """Clips gradients and steps; :func:`compile_step` returns it. Call it once per update.

    Attributes:
        norm: Norm of the gradients at the last call, before clipping: 0-dim. None without
            `max_norm`.
    """

    def __init__(
        self,
        optimizer: Any,
        max_norm: float | None,
        norm_type: float,
        compile_options: dict[str, Any],
        *,
        write_grads: bool,
    ) -> None:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ScalerTypeError(
                f"{type(optimizer).__name__} cannot be compiled: its step needs a closure."
            )
        if max_norm is not None:
            max_norm, norm_type = arguments.clipping(max_norm, norm_type)
        self.norm: Tensor | None = None
        self._optimizer = optimizer
        self._max_norm, self._norm_type = max_norm, norm_type
        self._write_grads = write_grads
        self._has_warned = False
        self._options = {"dynamic": False, **compile_options}
        self._may_be_graphs = not self._options.keys().isdisjoint(("mode", "options"))
        self._copies = StepCopies(optimizer)
        self._compiled: dict[Any, tuple[Any, Any]] = {}

    def __call__(self) -> Any:
        """Clips and steps.

        Returns:
            What the optimizer's step returns; None after two passes.
        """
        work = self._work()
        if work is None:
            self._clip()
            return self._optimizer.step()
        _, self.norm = self._run(work)
        return None

    def _work(self) -> Work | None:
        """Returns the tensors of two passes; None for an eager step, with a warning if all are."""
        optimizer = self._optimizer
        work = work_of(optimizer)
        if work is not None:
            is_missing = any(tensor is None for tensor in (*flat(work.states), *work.counts))
            return None if is_missing else work
        if grads_of(params_of(optimizer)) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"steps of {type(optimizer).__name__} run eagerly: two passes are for torch's own "
                "Adam, AdamW and SGD without hooks, and for dense float32 or float64 gradients on "
                "one CPU or CUDA device. The numbers are the same.",
                stacklevel=3,
            )
        return None

    def _clip(self) -> None:
        if self._max_norm is not None:
            self.norm = clip_(params_of(self._optimizer), self._max_norm, self._norm_type)

    def _run(
        self, work: Work, inv_scale: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Steps on the tensors that ``work_of`` returned just now.

        If ``inv_scale`` is given (float32, 0-dim, on the weights' device), multiplies gradients by
        it, and changes nothing if one of them is not finite then. Returns the flag, if there is an
        ``inv_scale``, and the norm of the unscaled gradients, if they are clipped.
        """
        measure, update = self._functions(work, has_scale=inv_scale is not None)
        numbers = numbers_of(self._optimizer, work)
        counts = stacked(work.counts, numbers)
        with torch.no_grad():
            found = measure(work.grads, inv_scale, counts, numbers)
            if self._may_be_graphs:  # the second graph reuses the memory of the first
                found = [value if value is None else value.clone() for value in found]
            found_inf, norm, factor, scalars = found
            with self._copies.written(work.weights) as (weights, lows, computed):
                pairs = [list(value) for *_, value in computed]
                mark_static([*weights, *flat(work.states), *flat(lows), *flat(pairs)])
                fused, apart = split(weights, lows)
                read = work.grads, scalars, inv_scale, factor, found_inf
                update(weights, fused, work.states, *read)
                if apart or computed:
                    self._write_copies(apart, computed)
            count_step(work.counts, found_inf)
        mark_stepped(self._optimizer)
        return found_inf, norm

    @functools.cached_property
    def _write_copies(self) -> Any:
        """Compiled function that writes the copies that an update does not."""
        return torch.compile(with_own_code(write_copies), **self._options)

    def _functions(self, work: Work, *, has_scale: bool) -> tuple[Any, Any]:
        """Returns both passes, compiled once for each combination of flags."""
        key = work.rule.update, work.flags, work.sizes, work.weights[0].dtype, has_scale
        if key not in self._compiled:
            passes = (
                measure_of(work, self._max_norm, self._norm_type),
                update_of(work, write_grads=self._write_grads),
            )
            measure, update = (torch.compile(with_own_code(f), **self._options) for f in passes)
            self._compiled[key] = measure, update
        return self._compiled[key]


def compile_step(
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    write_grads: bool = False,
    **compile_options: Any,
) -> PlainStep:
    """Compiles clipping, the optimizer's step and the casts of updated weights into one call.

    Use it to train in bfloat16 or float32; with a scaler use `GradScaler.compile_step`. The call
    gives the numbers of ``torch.nn.utils.clip_grad_norm_`` and ``optimizer.step()``, within
    roundings, in two passes over memory. It writes the low-precision copies of weights that amp_fx
    caches, so that the next forward finds them fresh::

        compiled = torch.compile(model, backend="amp_fx")
        step = amp_fx.compile_step(optimizer, max_norm=1.0)
        for inputs, targets in data:
            optimizer.zero_grad()
            loss_fn(compiled(inputs), targets).backward()
            step()

    Adam, AdamW and SGD take two passes, with any of their settings but `differentiable`, on dense
    float32 or float64 weights on one device, a CPU or CUDA, from the second step on: the first
    creates the optimizer's state. Everything else runs eagerly: clipping, then the step. A warning
    says so if an optimizer never takes two passes.

    Gradients that are not finite reach the weights, as they do without this.

    Args:
        optimizer: The optimizer to step.
        max_norm: Clip gradients to this norm; None does not clip.
        norm_type: The order of the norm.
        write_grads: True also clips gradients in place, which writes 4 bytes more for each.
            Otherwise `.grad` keeps what the backward wrote.
        compile_options: Options of torch.compile.

    Raises:
        ScalerTypeError: The optimizer's step needs a closure.
        ScalerValueError: `max_norm` is negative or not a number.
    """
    return PlainStep(optimizer, max_norm, norm_type, compile_options, write_grads=write_grads)
