"""Compiled optimizer steps without a scaler. ``scaler.py`` extends them for scalers."""

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
    """Result of :func:`compile_step`: clips gradients and steps. Call it once per update.

    Attributes:
        norm: Norm of the gradients in the latest call before clipping, a 0-dim tensor. None without
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
                f"{type(optimizer).__name__} cannot be compiled, because its step needs a closure: "
                "call optimizer.step(closure) instead."
            )
        if max_norm is not None:
            max_norm, norm_type = arguments.clipping(max_norm, norm_type)
        self.norm: Tensor | None = None
        self._optimizer = optimizer
        self._max_norm, self._norm_type = max_norm, norm_type
        self._write_grads = write_grads
        self._has_warned = False
        self._options = {"dynamic": False, **compile_options}
        self._may_use_cudagraphs = not self._options.keys().isdisjoint(("mode", "options"))
        self._copies = StepCopies(optimizer)
        self._compiled: dict[Any, tuple[Any, Any]] = {}

    def __call__(self) -> Any:
        """Clips and steps.

        Returns:
            The result of the optimizer's step; None if the step used two passes.
        """
        work = self._work()
        if work is None:
            self._clip()
            return self._optimizer.step()
        _, self.norm = self._run(work)
        return None

    def _work(self) -> Work | None:
        """Returns the tensors of a two-pass step; None if the step must run eagerly.

        Warns once if all steps of the optimizer run eagerly.
        """
        optimizer = self._optimizer
        work = work_of(optimizer)
        if work is not None:
            is_missing = any(tensor is None for tensor in (*flat(work.states), *work.counts))
            return None if is_missing else work
        if grads_of(params_of(optimizer)) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"steps of {type(optimizer).__name__} run eagerly, with the same results: compiled "
                "steps require torch's Adam, AdamW or SGD without hooks, dense float32 or float64 "
                "gradients on one CPU or CUDA device, and weights that share no memory.",
                stacklevel=3,
            )
        return None

    def _clip(self) -> None:
        if self._max_norm is not None:
            self.norm = clip_(params_of(self._optimizer), self._max_norm, self._norm_type)

    def _run(
        self, work: Work, inv_scale: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Runs a two-pass step.

        Args:
            work: The current result of ``work_of``.
            inv_scale: Factor of the gradients, a 0-dim float32 tensor on the weights' device. If a
                product is not finite, the step changes nothing.

        Returns:
            The overflow flag, or None without ``inv_scale``; and the norm of the unscaled
            gradients, or None without clipping.
        """
        measure, update = self._functions(work, has_scale=inv_scale is not None)
        numbers = numbers_of(self._optimizer, work)
        counts = stacked(work.counts, numbers)
        with torch.no_grad():
            measured = measure(work.grads, inv_scale, counts, numbers)
            if self._may_use_cudagraphs:  # the second graph reuses the memory of the first
                measured = [value if value is None else value.clone() for value in measured]
            found_inf, norm, factor, scalars = measured
            with self._copies.written(work.weights) as (weights, lows, computed):
                pairs = [list(value) for *_, value in computed]
                mark_static([*weights, *flat(work.states), *flat(lows), *flat(pairs)])
                fused, separate = split(weights, lows)
                read_only = work.grads, scalars, inv_scale, factor, found_inf
                update(weights, fused, work.states, *read_only)
                if separate or computed:
                    self._write_copies(separate, computed)
            count_step(work.counts, found_inf)
        mark_stepped(self._optimizer)
        return found_inf, norm

    @functools.cached_property
    def _write_copies(self) -> Any:
        """Compiled function that writes the copies that are not part of an update."""
        return torch.compile(with_own_code(write_copies), **self._options)

    def _functions(self, work: Work, *, has_scale: bool) -> tuple[Any, Any]:
        """Returns both passes, compiled once for each combination of flags."""
        key = work.rule.update, work.flags, work.sizes, work.weights[0].dtype, has_scale
        if key not in self._compiled:
            measure = measure_of(work, self._max_norm, self._norm_type)
            update = update_of(work, write_grads=self._write_grads)
            self._compiled[key] = (
                torch.compile(with_own_code(measure), **self._options),
                torch.compile(with_own_code(update), **self._options),
            )
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

    Use it to train in bfloat16 or float32; with a scaler, use `GradScaler.compile_step`. The call
    returns the same results as ``torch.nn.utils.clip_grad_norm_`` and ``optimizer.step()`` within
    roundings, in two passes over memory. It also refreshes the cached low-precision copies of the
    weights, so that the next forward does not cast them::

        compiled = torch.compile(model, backend="amp_fx")
        step = amp_fx.compile_step(optimizer, max_norm=1.0)
        for inputs, targets in data:
            optimizer.zero_grad()
            loss_fn(compiled(inputs), targets).backward()
            step()

    Two passes are supported for Adam, AdamW and SGD with any settings except `differentiable`, and
    for dense float32 or float64 weights on one CPU or CUDA device. The first step runs eagerly
    because it creates the optimizer's state. All other steps run eagerly as well: clipping, then
    the step. A warning is issued if an optimizer is not supported.

    As in eager training, gradients that are not finite reach the weights.

    Args:
        optimizer: The optimizer to step.
        max_norm: Clips gradients to this norm; None does not clip.
        norm_type: The order of the norm.
        write_grads: Whether to clip gradients in place as well, which writes 4 more bytes per
            element. Otherwise `.grad` is not changed.
        compile_options: Options of torch.compile.

    Raises:
        ScalerTypeError: The optimizer's step needs a closure.
        ScalerValueError: `max_norm` is negative or not a number.
    """
    return PlainStep(optimizer, max_norm, norm_type, compile_options, write_grads=write_grads)
