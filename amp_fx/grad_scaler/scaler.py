"""`GradScaler`: float16 gradients that neither vanish nor surprise."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_fx.errors import (
    Float16LossWarning,
    ScaleCollapseError,
    ScaleCollapseWarning,
    ScalerStateError,
)
from amp_fx.grad_scaler import arguments, host_scale, unscale
from amp_fx.grad_scaler.agreement import Agreement, any_dtensor, params_of
from amp_fx.grad_scaler.bookkeeping import Bookkeeping
from amp_fx.grad_scaler.compiled_step import CompiledStep
from amp_fx.grad_scaler.ledger import any_skipped
from amp_fx.grad_scaler.limits import Limits
from amp_fx.grad_scaler.outputs import map_nested, widen
from amp_fx.grad_scaler.stepping import refuse_closure, step_checked, step_fused

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from amp_fx.grad_scaler.names import NamedParameters


class GradScaler(Bookkeeping):
    """Scales losses so that float16 gradients do not vanish, and keeps overflows from the weights.

    A drop-in for :class:`torch.amp.GradScaler`, with the same methods, state dict and errors::

        scaler = amp_fx.GradScaler(named_parameters=model.named_parameters())
        for inputs, targets in data:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_and_clip_(optimizer, max_norm=1.0)  # optional
            scaler.step(optimizer)  # skipped if gradients overflowed
            scaler.update()
            scaler.step_scheduler(scheduler)  # stepped only if the optimizer was

    What differs from torch's:

    * The scale stops at `min_scale` where torch's reaches 0.
    * Unscaling by a scale below 1 can overflow; that counts as an overflow.
    * Low-precision outputs are scaled in float32 whatever their number of dimensions (torch keeps
      a 1-dim float16 output in float16, where 2.0 times the initial scale is infinite).
    * bfloat16 gradients work on every device.
    * A step waits for the device only where the optimizer offers no other way: not for fused or
      capturable optimizers, nor for any that was compiled with `compile_step`.
    * `last_step`, `history` and error messages name the parameters concerned.

    Args:
        device: device type of the losses, such as "cuda" or "cpu". Without CUDA a "cuda" scaler
            warns and disables itself.
        init_scale: the first scale.
        growth_factor: factor by which the scale grows after `growth_interval` updates in a row
            without overflow; above 1.
        backoff_factor: factor by which the scale shrinks after an overflow; between 0 and 1.
        growth_interval: number of updates; at least 1.
        enabled: whether to do anything. A disabled scaler only steps optimizers.
        named_parameters: pairs of name and parameter, to name parameters by. Optimizers that were
            given names need no others.
        allow_fp16: whether gradients that are float16 themselves may be unscaled.
        min_scale: the scale does not shrink below this (unless it was set lower).
        max_scale: the scale does not grow above this (unless it was set higher); None for no limit.
        hysteresis: how many updates in a row with an overflow it takes to back off, the last of
            them and all that follow doing so; 1 backs off at once. Steps are skipped regardless.
        on_collapse: what to do when the scale shrinks without end, or step after step overflows at
            `min_scale`: "warn", once, or "raise".
        history_size: how many updates `history` remembers.
        process_group: the processes that skip a step together if one of them overflowed, so that
            their scales stay equal. Each must call the same methods, whether it has gradients or
            not. Those of DTensor parameters' meshes (FSDP2, tensor parallel) and of pipelines take
            part by themselves; after DDP an overflow has arrived everywhere.

    Raises:
        ScalerValueError: an argument has a value that is not allowed.
        ScalerTypeError: an argument is of the wrong kind.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        named_parameters: NamedParameters | None = None,
        allow_fp16: bool = False,
        min_scale: float = 2.0**-64,
        max_scale: float | None = None,
        hysteresis: int = 1,
        on_collapse: Literal["warn", "raise"] = "warn",
        history_size: int = 100,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """Check the settings; the scale is made on the device of the first output to be scaled."""
        device = arguments.device_type(device)
        if enabled and device == "cuda" and not torch.cuda.is_available():
            warnings.warn(
                "amp_fx.GradScaler is enabled, but CUDA is not available. Disabling.", stacklevel=2
            )
            enabled = False
        if enabled:
            init_scale = arguments.positive_float(init_scale, "init_scale")
            growth_factor = arguments.growth_factor(growth_factor)
            backoff_factor = arguments.backoff_factor(backoff_factor)
            growth_interval = arguments.growth_interval(growth_interval)
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._growth_factor = growth_factor  # torch sets these on enabled scalers only
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._allow_fp16 = allow_fp16
        self._limits = Limits(min_scale, max_scale, hysteresis)
        self._on_collapse = arguments.one_of(on_collapse, "on_collapse", ("warn", "raise"))
        self._agreement = Agreement(process_group)
        self._history_size = arguments.whole(history_size, "history_size", minimum=0)
        if enabled:
            self._limits.follow(init_scale)
        self._start(init_scale)
        if named_parameters is not None:
            self.name_parameters(named_parameters)

    # Scaling -------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply outputs by the scale.

        Args:
            outputs: a tensor, or tensors in lists, tuples, mappings or other iterables, nested at
                will and on any devices.

        Returns:
            The same structure, scaled; an iterable of another kind comes back as an iterator.
            float16 and bfloat16 tensors come back as float32, others keep their dtype.

        Raises:
            ScalerValueError: something is neither a tensor nor an iterable, or the first tensor is
                on the meta device, where no scale can be kept.
        """
        if not self._enabled:
            return outputs
        self._ledger.begin_iteration()
        scales: list[unscale.OnDevices] = []

        def scaled(value: Any) -> Any:
            if isinstance(value, Tensor):
                self._ledger.note_loss(value)
                if self._scale is None:
                    self._lazy_init_scale_growth_tracker(arguments.device_with_values(value))
                if not scales:
                    scales.append(unscale.on_devices(cast("Tensor", self._scale)))
                return widen(value) * scales[0][value.device]
            return map_nested(scaled, value)

        return scaled(outputs)

    def get_scale(self) -> float:
        """Return the scale, 1.0 if disabled; waits for the device."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else host_scale.wait_for(self._scale)

    # Unscaling and stepping ----------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, and check them.

        Optional: `step` does it where this was not called. Never waits for the device.

        Args:
            optimizer: whose gradients to unscale; once per optimizer and update.

        Raises:
            ScalerStateError: called twice, after `step`, or before `scale`.
            Float16GradientError: gradients are float16, and `allow_fp16` is False.
            ScalerTypeError: this is no optimizer.
        """
        if not self._enabled:
            return
        state = self._begin_unscale("unscale_", optimizer)
        groups = self._group(optimizer)
        found_inf = unscale.unscale_(groups, self._inv_scale(), may_overflow=self._may_amplify())
        self._unscaled(optimizer, state, found_inf)

    def unscale_and_clip_(
        self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Do `unscale_` and torch.nn.utils.clip_grad_norm_ in two passes over the gradients.

        The first pass takes the norm of the scaled gradients; the second checks, unscales and clips
        in one kernel. There are three where the scale may be below 1, for norms other than 1, 2 and
        infinity, and for float64. Never waits for the device.

        Where gradients overflowed, so that the step will be skipped, they are clipped as
        `clip_grad_norm_` does on the CPU; on a device infinities and NaNs stay where they were, for
        `last_step` to count.

        Args:
            optimizer: whose gradients to unscale and clip; once per optimizer and update.
            max_norm: the largest norm that gradients keep; infinity measures without clipping.
            norm_type: the order of the norm.

        Returns:
            The norm of the unscaled gradients before clipping: 0-dim, float32 at least.

        Raises:
            ScalerStateError: called after `unscale_` or `step`, or before `scale`.
            ScalerValueError: `max_norm` is negative or not a number.
            Float16GradientError: gradients are float16, and `allow_fp16` is False.
            ScalerTypeError: this is no optimizer.
        """
        max_norm, norm_type = arguments.max_norm(max_norm), arguments.norm_type(norm_type)
        arguments.optimizer(optimizer)
        if not self._enabled:
            return self._clip(optimizer, max_norm, norm_type)
        are_spread = any_dtensor(params_of(optimizer)) or self._agreement.pipelines(optimizer)
        state = self._begin_unscale("unscale_and_clip_", optimizer)
        groups = self._group(optimizer, coalesce=True)
        inv_scale, may_amplify = self._inv_scale(), self._may_amplify()
        if not (may_amplify or are_spread):
            done = unscale.unscale_and_clip_(groups, inv_scale, max_norm, norm_type)
            if done is not None:
                found_inf, norm = done
                self._unscaled(optimizer, state, found_inf)
                return norm
        found_inf = unscale.unscale_(groups, inv_scale, may_overflow=may_amplify)
        # Counts overflows before clipping spreads them.
        self._unscaled(optimizer, state, found_inf)
        return self._clip(optimizer, max_norm, norm_type)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless its gradients overflowed; unscales them first if need be.

        Without any gradients the optimizer's step is called as it is.

        Fused optimizers unscale and skip in their own kernels. Capturable ones are stepped and, on
        overflow, put back on the device. For all others the host waits for the check; see
        `compile_step`.

        Args:
            optimizer: what to step; once per update.
            args: for the optimizer's step.
            kwargs: for the optimizer's step.

        Returns:
            What the optimizer's step returns; None if it was skipped.

        Raises:
            ScalerStateError: called twice, or before `scale`.
            RuntimeError: a closure was passed; how often it would run is not defined.
            ScalerTypeError: this is no optimizer.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or kwargs:
            refuse_closure(args, kwargs)
        state = self._begin("step", optimizer)
        if state.stage is OptState.STEPPED:
            raise ScalerStateError("step() has already been called since the last update().")
        step = partial(optimizer.step, *args, **kwargs)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            result = step_fused(self, optimizer, state, step)
        else:
            if state.stage is OptState.READY:
                self.unscale_(optimizer)
            result = step_checked(self, optimizer, state, step)
        self._stepped(state)
        return result

    def compile_step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        update_scale: bool = True,
        write_grads: bool = False,
        **compile_options: Any,
    ) -> CompiledStep:
        """Make one compiled call out of unscaling, checking, clipping and stepping.

        The call takes the place of `unscale_`, `step` and `update`, gives the same numbers within
        roundings and, once the optimizer has its state, never waits for the device, whatever the
        optimizer::

            step = scaler.compile_step(optimizer, max_norm=1.0)
            for inputs, targets in data:
                optimizer.zero_grad()
                scaler.scale(loss_fn(model(inputs), targets)).backward()
                step()

        Adam, AdamW and SGD, whatever their settings but `differentiable`, take two passes over
        memory on a CPU and on CUDA, if all weights are dense, float32 or float64, and on one
        device: one for the norm and the check, and one that unscales, clips, updates and writes the
        low copies of weights that amp_fx keeps, so that the next forward finds them fresh. Others
        write gradients and read them again.

        Args:
            optimizer: what to step.
            max_norm: clip gradients to this norm; None does not clip.
            norm_type: the order of the norm.
            update_scale: whether the call also does `update`. Pass False where several optimizers
                share the scaler, and call `update` after the last. (An `update` too many right
                after the call does nothing.)
            write_grads: whether two passes unscale and clip gradients where they lie, too, which
                writes 4 bytes more for each. Otherwise `.grad` is afterwards what the backward
                left, scaled; `norm` of the call and `last_step` tell of it unscaled.
            compile_options: for torch.compile.

        Raises:
            ScalerTypeError: this is no optimizer.
            ScalerValueError: `max_norm` is negative or not a number.
        """
        return CompiledStep(
            self,
            arguments.optimizer(optimizer),
            max_norm=None if max_norm is None else arguments.max_norm(max_norm),
            norm_type=arguments.norm_type(norm_type),
            update_scale=update_scale,
            write_grads=write_grads,
            compile_options=compile_options,
        )

    # Updating ------------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Back the scale off after an overflow, grow it every `growth_interval` calls else.

        Call it once per iteration, after all steps. Never waits for the device. Optimizers that
        had no gradients do not count: the scale stays if there were no others.

        Args:
            new_scale: sets the scale instead. A tensor is copied: later changes to it do not
                matter.

        Raises:
            ScalerStateError: nothing was unscaled or stepped since the last update.
            ScalerValueError: `new_scale` is not a finite number above 0, or a tensor of more than
                one element, on another device type or with requires_grad. The scale stays.
            ScaleCollapseError: the scale shrinks without end, and `on_collapse` is "raise".
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        found_inf = self._states.found_infs()
        reports = self._states.reports()
        was_skipped = any_skipped(reports)
        if new_scale is not None:
            self._set_scale(scale, new_scale)
        elif found_inf:
            self._adjust_scale(scale, growth_tracker, found_inf, was_skipped)
        elif self._states.any_checked():
            pass  # without gradients: nothing is known of the scale
        elif self._is_updated_by_step:
            self._is_updated_by_step = False
            return
        else:
            raise ScalerStateError(
                "No inf checks were recorded prior to update: no optimizer with gradients was "
                "unscaled or stepped since the last update()."
            )
        self._ledger.end_iteration(scale, reports)
        self._states.begin_iteration()
        self._is_updated_by_step = False
        if was_skipped is False:
            return
        low_loss = self._ledger.find_low_loss()
        if low_loss is not None:
            warnings.warn(low_loss, Float16LossWarning, stacklevel=2)
        collapse = self._ledger.find_collapse(
            self._host_scale.seen,
            self._backoff_factor,
            self._limits.floor,
            is_told_once=self._on_collapse == "warn",
        )
        if collapse is None:
            return
        if self._on_collapse == "raise":
            raise ScaleCollapseError(collapse)
        warnings.warn(collapse, ScaleCollapseWarning, stacklevel=2)
