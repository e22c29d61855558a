"""`GradScaler`: float16 gradients that neither vanish nor surprise.

What it is made of: a scale, which `loss_scale.adjust` moves; the states of optimizers since the
last update, and a ledger of steps and updates (``reports``); the processes that skip steps
together (``processes``). Gradients are unscaled, checked and clipped by ``gradients``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_fx.errors import (
    Float16LossWarning,
    ScaleCollapseError,
    ScaleCollapseWarning,
    ScalerStateError,
    ScalerTypeError,
    ScalerValueError,
)
from amp_fx.grad_scaler import arguments, gradients, loss_scale
from amp_fx.grad_scaler.compiled_step import CompiledStep
from amp_fx.grad_scaler.eager_step import step_checked, step_fused
from amp_fx.grad_scaler.gradients import ParameterNames, group_gradients
from amp_fx.grad_scaler.loss_scale import HostScale, LossScale
from amp_fx.grad_scaler.processes import Agreement, any_dtensor, params_of, pipelines
from amp_fx.grad_scaler.reports import Ledger, OptimizerStates, any_skipped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from amp_fx.grad_scaler.gradients import Flags, GradGroup, NamedParameters
    from amp_fx.grad_scaler.reports import OptimizerState, StepReport, UpdateRecord

Outputs = TypeVar("Outputs", Tensor, list[Any], tuple[Any, ...], dict[Any, Any])


class GradScaler(torch.amp.GradScaler):
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
        """Checks the settings; the scale is made on the device of the first output to be scaled."""
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
            growth_interval = arguments.whole(growth_interval, "growth_interval", minimum=1)
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._growth_factor = growth_factor  # torch sets these on enabled scalers only
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._allow_fp16 = allow_fp16
        self._limits = loss_scale.checked_limits(min_scale, max_scale, hysteresis)
        self._num_overflows: int | Tensor = 0  # in a row; counted with hysteresis only
        self._on_collapse = arguments.one_of(on_collapse, "on_collapse", ("warn", "raise"))
        self._agreement = Agreement(process_group)
        self._history_size = arguments.whole(history_size, "history_size", minimum=0)
        if enabled:
            self._limits = self._limits.around(init_scale)
        self._start(init_scale)
        if named_parameters is not None:
            self.name_parameters(named_parameters)

    def _start(self, init_scale: float) -> None:
        """Sets up what belongs to this process and is never saved."""
        self._states = OptimizerStates()
        self._names = ParameterNames()
        self._host_scale = HostScale(init_scale)
        self._ledger = Ledger(init_scale, self._history_size)
        self._is_updated_by_step = False

    # Scaling -------------------------------------------------------------------------------------

    @overload
    def scale(self, outputs: Outputs) -> Outputs: ...

    @overload
    def scale(self, outputs: Iterable[Any]) -> Iterable[Any]: ...

    def scale(self, outputs: Any) -> Any:
        """Multiplies outputs by the scale.

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
        scales: list[gradients.OnDevices] = []

        def scaled(value: Any) -> Any:
            if isinstance(value, Tensor):
                self._ledger.note_loss(value)
                if self._scale is None:
                    self._lazy_init_scale_growth_tracker(arguments.device_with_values(value))
                if not scales:
                    scales.append(gradients.OnDevices(cast("Tensor", self._scale)))
                return gradients.upcast(value) * scales[0][value.device]
            return _map_nested(scaled, value)

        return scaled(outputs)

    def get_scale(self) -> float:
        """Returns the scale, 1.0 if disabled; waits for the device."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else loss_scale.wait_for(self._scale)

    # Unscaling and stepping ----------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of the optimizer's parameters by the scale, and checks them.

        Optional: `step` does it where this was not called. Never waits for the device.

        Args:
            optimizer: whose gradients to unscale; once per optimizer and update.

        Raises:
            ScalerStateError: called twice, after `step`, or before `scale`.
            Float16GradientError: gradients are float16, and `allow_fp16` is False.
            ScalerTypeError: this is not an optimizer.
        """
        if not self._enabled:
            return
        state = self._begin("unscale_", optimizer)
        state.refuse_to_unscale_again("unscale_")
        self._unscale(optimizer, state, self._group(optimizer))

    def unscale_and_clip_(
        self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Does `unscale_` and torch.nn.utils.clip_grad_norm_ in two passes over the gradients.

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
            ScalerTypeError: this is not an optimizer.
        """
        max_norm, norm_type = arguments.clipping(max_norm, norm_type)
        if not self._enabled:
            return self._clip(arguments.optimizer(optimizer), max_norm, norm_type)
        state = self._begin("unscale_and_clip_", optimizer)
        state.refuse_to_unscale_again("unscale_and_clip_")
        are_sharded = any_dtensor(params_of(optimizer)) or pipelines(optimizer)
        groups = self._group(optimizer, coalesce=True)
        if not (self._may_amplify() or are_sharded):
            inv_scale = self._inv_scale()
            done = gradients.unscale_and_clip_(groups, inv_scale, max_norm, norm_type)
            if done is not None:
                found_inf, norm = done
                self._unscaled(optimizer, state, found_inf)
                return norm
        self._unscale(optimizer, state, groups)  # counts overflows before clipping spreads them
        return self._clip(optimizer, max_norm, norm_type)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps the optimizer unless its gradients overflowed; unscales them first if need be.

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
            ScalerTypeError: this is not an optimizer.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if kwargs.get("closure") is not None or (args and any(map(callable, args))):
            raise ScalerStateError(
                "Closure use is not currently supported if GradScaler is enabled."
            )
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
        """Makes one compiled call out of unscaling, checking, clipping and stepping.

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
        low-precision copies of weights that amp_fx keeps, so that the next forward finds them
        fresh. Others write gradients and read them again.

        Args:
            optimizer: what to step.
            max_norm: clip gradients to this norm; None does not clip.
            norm_type: the order of the norm.
            update_scale: whether the call also does `update`. Pass False where several optimizers
                share the scaler, and call `update` after the last. (An `update` too many right
                after the call does nothing.)
            write_grads: whether two passes unscale and clip gradients where they lie, too, which
                writes 4 bytes more for each. Otherwise `.grad` is afterwards what the backward
                left, scaled; `norm` of the call and `last_step` report it unscaled.
            compile_options: for torch.compile.

        Raises:
            ScalerTypeError: this is not an optimizer.
            ScalerValueError: `max_norm` is negative or not a number.
        """
        return CompiledStep(
            self,
            arguments.optimizer(optimizer),
            update_scale=update_scale,
            write_grads=write_grads,
            compile_options=compile_options,
            **arguments.optional_clipping(max_norm, norm_type),
        )

    # Updating ------------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Backs the scale off after an overflow, grows it every `growth_interval` calls otherwise.

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
        reports = self._states.reports()
        was_skipped = any_skipped(reports)
        if new_scale is not None:
            self._set_scale(scale, new_scale)
        elif flags := self._states.flags():
            now = LossScale(scale, growth_tracker, self._num_overflows)
            self._adjust_scale(now, gradients.combine(flags, scale.device), was_skipped)
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
        self._ledger.end_iteration(scale, reports, was_skipped)
        self._states.begin_iteration()
        self._is_updated_by_step = False
        if was_skipped is not False:
            self._warn_of_overflows()

    def _adjust_scale(self, now: LossScale, found_inf: Tensor, was_skipped: bool | None) -> None:
        factors = self._growth_factor, self._backoff_factor, self._growth_interval
        limits, on_host = self._limits, self._host_scale
        may_reach_floor = on_host.expect_update(
            self._backoff_factor, limits.floor, skipped=was_skipped
        )
        new = loss_scale.adjust(now, found_inf, factors, limits, may_reach_floor=may_reach_floor)
        self._scale, self._growth_tracker, self._num_overflows = new
        on_host.follow_update(new.scale, limits.floor)

    def _set_scale(self, scale: Tensor, new_scale: float | Tensor) -> None:
        """Takes over a scale that the user chose; limits that exclude it move."""
        if isinstance(new_scale, Tensor):
            new_scale = arguments.new_scale_tensor(new_scale, self._device)
            scale.copy_(new_scale)
            value = loss_scale.peek(new_scale)
        else:
            value = arguments.positive_float(new_scale, "new_scale")
            scale.fill_(value)
        self._follow(scale if value is None else value)
        self._ledger.forget_peak(value)

    def _follow(self, new_scale: float | Tensor) -> None:
        """Forgets what was known of the scale before it was set; a tensor is on a device."""
        self._limits = self._limits.around(new_scale)
        self._num_overflows = 0
        self._host_scale = HostScale(None if isinstance(new_scale, Tensor) else new_scale)

    def _warn_of_overflows(self) -> None:
        low_loss = self._ledger.find_low_loss()
        if low_loss is not None:
            warnings.warn(low_loss, Float16LossWarning, stacklevel=3)
        raises = self._on_collapse == "raise"
        collapse = self._ledger.find_collapse(
            self._host_scale.seen, self._backoff_factor, self._limits.floor, warns_once=not raises
        )
        if collapse is None:
            return
        if raises:
            raise ScaleCollapseError(collapse)
        warnings.warn(collapse, ScaleCollapseWarning, stacklevel=3)

    # What happened -------------------------------------------------------------------------------

    @property
    def last_step(self) -> StepReport | None:
        """The report on the newest step; None before the first and for a disabled scaler."""
        return self._ledger.last_step

    def history(self) -> list[UpdateRecord]:
        """Lists scale, skips and overflows of the last `history_size` updates, oldest first.

        May wait for the device. Parameters that overflowed are known where the scaler knew at once
        that the step was skipped, and where `last_step` was asked in time.
        """
        return self._ledger.history()

    def name_parameters(self, named_parameters: NamedParameters) -> None:
        """Learns what parameters are called, for reports and errors.

        Args:
            named_parameters: pairs of name and parameter, as `model.named_parameters()` gives.

        Raises:
            ScalerTypeError: there is something else in it.
        """
        self._names.add(named_parameters)

    def step_scheduler(self, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        """Steps a learning-rate scheduler if the last step of its optimizer was not skipped.

        Call it after `step`; before or after `update` makes no difference. May wait for the device
        where the scaler itself did not have to.

        Args:
            scheduler: of an optimizer that this scaler steps.
            args: for the scheduler's step.
            kwargs: for the scheduler's step.

        Returns:
            Whether the scheduler was stepped.

        Raises:
            ScalerStateError: this scaler has not stepped the scheduler's optimizer yet.
            ScalerTypeError: this is not a scheduler.
        """
        if not callable(getattr(scheduler, "step", None)):
            raise ScalerTypeError(
                f"expected a learning-rate scheduler; got {type(scheduler).__name__!r}."
            )
        if self._enabled:
            state = self._states.known(getattr(scheduler, "optimizer", None))
            if state is None or state.last_step is None:
                raise ScalerStateError(
                    "this scaler has not stepped the scheduler's optimizer yet; call "
                    "scaler.step(optimizer) first."
                )
            if state.last_step.skipped:
                return False
        scheduler.step(*args, **kwargs)
        return True

    # Settings and state --------------------------------------------------------------------------

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale grows; above 1."""
        self._growth_factor = arguments.growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale shrinks after an overflow; between 0 and 1."""
        self._backoff_factor = arguments.backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the number of updates without overflow after which the scale grows; at least 1."""
        self._growth_interval = arguments.whole(new_interval, "growth_interval", minimum=1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class or of torch.amp.GradScaler returned.

        Raises:
            ScalerStateDictError: an entry is missing, not known or wrong. Nothing is loaded then.
        """
        if not self._enabled:
            return
        state = arguments.state_dict(state_dict)
        super().load_state_dict(state)
        self._follow(state["scale"])
        self._ledger.set_scale(state["scale"])

    def __getstate__(self) -> dict[str, Any]:
        """Returns settings, scale and growth; not the names, the history or the last step."""
        if len(self._states):
            raise ScalerStateError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or "
                "at the end after scaler.update()."
            )
        state = super().__getstate__()
        for key in ("_names", "_host_scale", "_ledger", "_states"):
            del state[key]
        if isinstance(self._num_overflows, Tensor):
            state["_num_overflows"] = self._num_overflows.item()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Goes on from the saved scale and growth, on whatever device asks first."""
        super().__setstate__(state)
        if "_num_overflows" not in state:  # older pickles have it among the limits
            self._num_overflows = vars(self._limits).pop("num_overflows")
        self._start(state.get("_init_scale", 1.0))

    # What all ways to step share ------------------------------------------------------------------

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise ScalerStateError(
                f"Attempted {funcname} but _scale is None. This may indicate your "
                "script did not use scaler.scale(loss or outputs) earlier in the iteration."
            )
        return self._scale, self._growth_tracker

    def _begin(self, name: str, optimizer: Any) -> OptimizerState:
        if self._states.known(optimizer) is None:
            arguments.optimizer(optimizer)
        if self._scale is None:
            if not self._agreement.is_alone(optimizer):
                # A process that had no loss must not leave the others waiting for its flag.
                self._lazy_init_scale_growth_tracker(params_of(optimizer)[0].device)
            self._check_scale_growth_tracker(name)
        return self._states.of(optimizer)

    def _group(
        self, optimizer: Any, *, coalesce: bool = False, allow_fp16: bool = False
    ) -> list[GradGroup]:
        allow_fp16 = allow_fp16 or self._allow_fp16
        return group_gradients(optimizer, self._names, allow_fp16=allow_fp16, coalesce=coalesce)

    def _clip(self, optimizer: Any, max_norm: float, norm_type: float) -> Tensor:
        """Clips gradients that are not scaled, or not any longer; returns their norm."""
        groups = self._group(optimizer, allow_fp16=True, coalesce=True)
        norm = gradients.norm_of_all(optimizer, groups, norm_type)
        return gradients.clip_(groups, max_norm, norm)

    def _unscale(self, optimizer: Any, state: OptimizerState, groups: list[GradGroup]) -> None:
        inv_scale, may_overflow = self._inv_scale(), self._may_amplify()
        found_inf = gradients.unscale_(groups, inv_scale, may_overflow=may_overflow)
        self._unscaled(optimizer, state, found_inf)

    def _inv_scale(self, device: torch.device | None = None) -> Tensor:
        assert self._scale is not None
        inv_scale = self._scale.reciprocal()
        return inv_scale if device is None else gradients.OnDevices(inv_scale)[device]

    def _may_amplify(self) -> bool:
        """Returns whether the scale may be below 1, as far as is known without waiting."""
        return self._host_scale.lower_bound < 1.0

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Checks gradients without unscaling them; part of torch's contract with optimizers."""
        state = self._begin("_check_inf_per_device", optimizer)
        state.inv_scale = self._inv_scale() if self._may_amplify() else None
        found_inf = gradients.check(self._group(optimizer, allow_fp16=True), state.inv_scale)
        return self._found(optimizer, state, found_inf)

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Returns what the checks found; part of torch's contract with optimizers."""
        return self._states.of(optimizer).found_inf

    def _found(self, optimizer: Any, state: OptimizerState, found_inf: Flags) -> Flags:
        """Keeps what a check found: here, or in any process that takes part.

        Without gradients nothing was infinite, and the scale is not shown to be good.
        """
        assert self._scale is not None
        flag = gradients.combine([*found_inf.values()], self._scale.device)
        is_alone = self._agreement.is_alone(optimizer)
        if not is_alone:
            self._agreement.reduce_(flag, optimizer)
        state.flag, state.had_gradients = flag, bool(found_inf) or not is_alone
        state.found_inf = found_inf if found_inf and is_alone else {flag.device: flag}
        return state.found_inf

    def _unscaled(self, optimizer: Any, state: OptimizerState, found_inf: Flags) -> None:
        self._found(optimizer, state, found_inf)
        state.stage = OptState.UNSCALED
        state.make_report(self._names)

    def _stepped(self, state: OptimizerState, found_inf: Tensor | None = None) -> None:
        if found_inf is not None:  # by a compiled step; its processes agreed already
            assert self._scale is not None
            state.found_inf = {found_inf.device: found_inf}
            state.flag = gradients.combine([found_inf], self._scale.device)
        state.stage = OptState.STEPPED
        state.last_step = state.report or state.make_report(self._names)
        self._ledger.last_step = state.last_step


def _map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to each item of a container, which keeps its kind as far as it can."""
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ScalerValueError(
            f"outputs must be a Tensor or an iterable of Tensors; got {type(value).__name__!r}."
        )
    if hasattr(value, "_make"):  # a named tuple
        return value._make(map(function, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(function, value))
    return map(function, value)
