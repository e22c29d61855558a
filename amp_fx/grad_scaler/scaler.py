"""`GradScaler`: float16 gradients that neither vanish nor surprise."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_fx.errors import ScaleCollapseWarning, ScalerStateError, ScalerTypeError, ScalerValueError
from amp_fx.grad_scaler import arguments, predicated, unscale
from amp_fx.grad_scaler.compiled_step import CompiledStep
from amp_fx.grad_scaler.gradients import GradGroup, group_gradients
from amp_fx.grad_scaler.host_scale import HostScale, peek, wait_for
from amp_fx.grad_scaler.ledger import Ledger, any_skipped
from amp_fx.grad_scaler.names import NamedParameters, ParameterNames
from amp_fx.grad_scaler.reports import StepReport, UpdateRecord, count_overflows
from amp_fx.grad_scaler.states import OptimizerState, OptimizerStates, weakly
from amp_fx.grad_scaler.torch_private import update_scale_

if TYPE_CHECKING:
    from collections.abc import Callable

# The smallest scale that float32 can invert without loss.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny

_LOW_DTYPES = (torch.float16, torch.bfloat16)

_NOT_SCALED = (
    "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the "
    "iteration."
)


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
        history_size: how many updates `history` remembers.

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
        history_size: int = 100,
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
        self._min_scale = arguments.positive_float(min_scale, "min_scale")
        self._history_size = arguments.whole(history_size, "history_size", minimum=0)
        self._start(init_scale)
        if named_parameters is not None:
            self.name_parameters(named_parameters)

    def _start(self, init_scale: float) -> None:
        """Set up what belongs to this process and is never saved."""
        self._per_optimizer_states = OptimizerStates()  # type: ignore[assignment]
        self._names = ParameterNames()
        self._host_scale = HostScale(init_scale)
        self._floor = min(self._min_scale, init_scale)
        self._ledger = Ledger(init_scale, self._history_size)
        self._is_updated_by_step = False

    @property
    def _states(self) -> OptimizerStates:
        return cast("OptimizerStates", self._per_optimizer_states)

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
            ScalerValueError: something is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        self._ledger.begin_iteration()
        scales: list[unscale.OnDevices] = []

        def scaled(value: Any) -> Any:
            if isinstance(value, Tensor):
                if self._scale is None:
                    self._lazy_init_scale_growth_tracker(value.device)
                if not scales:
                    scales.append(unscale.OnDevices(cast("Tensor", self._scale)))
                return _widen(value) * scales[0][value.device]
            return _map_nested(scaled, value)

        return scaled(outputs)

    def get_scale(self) -> float:
        """Return the scale, 1.0 if disabled; waits for the device."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else wait_for(self._scale)

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
        state.found_inf = unscale.unscale_(
            groups, self._inv_scale(), may_overflow=self._may_amplify()
        )
        self._unscaled(optimizer, state)

    def unscale_and_clip_(
        self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Do `unscale_` and torch.nn.utils.clip_grad_norm_ in two passes over the gradients.

        The first pass takes the norm of the scaled gradients; the second checks, unscales and clips
        in one kernel. Where the scale may be below 1, or for norms other than 1, 2 and infinity,
        there are three passes. Never waits for the device.

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
        if not self._enabled:
            groups = group_gradients(
                arguments.optimizer(optimizer), self._names, allow_fp16=True, coalesce=True
            )
            return _clip_(groups, max_norm, norm_type)
        state = self._begin_unscale("unscale_and_clip_", optimizer)
        groups = self._group(optimizer, coalesce=True)
        inv_scale = self._inv_scale()
        if not self._may_amplify() and unscale.can_clip_scaled(groups, norm_type):
            scaled_norm = unscale.total_norm(groups, norm_type)
            known = peek(scaled_norm)
            if known is None or math.isfinite(known):
                norm = scaled_norm * inv_scale.to(scaled_norm.device)
                factor = unscale.clip_factor(norm, max_norm)
                if known is None:
                    factor = torch.where(norm.isfinite(), factor, 1.0)
                factor = factor.to(torch.float32) * inv_scale.to(factor.device)
                state.found_inf = unscale.unscale_(groups, factor)
                self._unscaled(optimizer, state)
                return norm.to(unscale.norm_dtype(groups))
        state.found_inf = unscale.unscale_(groups, inv_scale, may_overflow=self._may_amplify())
        self._unscaled(optimizer, state)
        return _clip_(groups, max_norm, norm_type)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless its gradients overflowed; unscales them first if need be.

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
            ScalerStateError: called twice, before `scale`, or without any gradients.
            RuntimeError: a closure was passed; how often it would run is not defined.
            ScalerTypeError: this is no optimizer.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        _refuse_closure(args, kwargs)
        self._check_scale_growth_tracker("step")
        state = self._states.of(arguments.optimizer(optimizer))
        if state.stage is OptState.STEPPED:
            raise ScalerStateError("step() has already been called since the last update().")
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._step_fused(optimizer, state, args, kwargs)
        if state.stage is OptState.READY:
            self.unscale_(optimizer)
        return self._step_checked(optimizer, state, args, kwargs)

    def compile_step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        update_scale: bool = True,
        **compile_options: Any,
    ) -> CompiledStep:
        """Make one compiled call out of unscaling, checking, clipping and stepping.

        The call takes the place of `unscale_`, `step` and `update`, gives the same numbers and,
        once the optimizer has its state, never waits for the device, whatever the optimizer::

            step = scaler.compile_step(optimizer, max_norm=1.0)
            for inputs, targets in data:
                optimizer.zero_grad()
                scaler.scale(loss_fn(model(inputs), targets)).backward()
                step()

        Args:
            optimizer: what to step.
            max_norm: clip gradients to this norm; None does not clip.
            norm_type: the order of the norm.
            update_scale: whether the call also does `update`. Pass False where several optimizers
                share the scaler, and call `update` after the last. (An `update` too many right
                after the call does nothing.)
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
            compile_options=compile_options,
        )

    def _step_fused(
        self,
        optimizer: Any,
        state: OptimizerState,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step an optimizer that takes `grad_scale` and `found_inf` (torch's contract for it)."""
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument to the passed "
                "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
                "`found_inf: Tensor` to the passed optimizer and let the optimizer use them "
                "directly.",
                FutureWarning,
                stacklevel=3,
            )
            result = optimizer.step(*args, **kwargs, grad_scaler=self)
            self._stepped(optimizer, state)
            return result
        scale = cast("Tensor", self._scale)
        was_unscaled = state.stage is OptState.UNSCALED
        if was_unscaled:
            grad_scale = getattr(optimizer, "grad_scale", None)
        elif self._may_amplify():  # the optimizer's own unscaling would overflow unseen
            self.unscale_(optimizer)
            grad_scale = torch.ones_like(scale) * getattr(optimizer, "grad_scale", 1)
        else:
            self._check_inf_per_device(optimizer)
            grad_scale = scale * getattr(optimizer, "grad_scale", 1)
        optimizer.grad_scale = grad_scale
        optimizer.found_inf = self._combine(state.found_inf)
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        self._stepped(optimizer, state)
        return result

    def _step_checked(
        self,
        optimizer: Any,
        state: OptimizerState,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step an optimizer whose gradients are unscaled and checked, if they are finite."""
        if not state.found_inf:
            raise ScalerStateError(
                "No inf checks were recorded for this optimizer: none of its parameters had a "
                "gradient. Call backward() on the scaled loss first, or leave out step() for an "
                "optimizer that has nothing to do in this iteration."
            )
        report = self._report(optimizer, state)
        is_capturable = all(group.get("capturable", False) for group in optimizer.param_groups)
        if is_capturable and report.peek_skipped() is None:
            tensors = predicated.stepped_tensors(optimizer)
            if tensors is not None:
                found_inf = self._combine(state.found_inf)
                result = predicated.step_unless(found_inf, optimizer, tensors, args, kwargs)
                self._stepped(optimizer, state)
                return result
        result = None if report.learn_skipped() else optimizer.step(*args, **kwargs)
        self._stepped(optimizer, state)
        return result

    # Updating ------------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Back the scale off after an overflow, grow it every `growth_interval` calls else.

        Call it once per iteration, after all steps. Never waits for the device.

        Args:
            new_scale: sets the scale instead. A tensor is copied: later changes to it do not
                matter.

        Raises:
            ScalerStateError: nothing was unscaled or stepped since the last update.
            ScalerValueError: `new_scale` is not a finite number above 0, or a tensor of more than
                one element, on another device type or with requires_grad. The scale stays.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        found_inf = [flag for state in self._states for flag in state.found_inf.values()]
        if new_scale is not None:
            self._set_scale(scale, new_scale)
        elif found_inf:
            self._adjust_scale(scale, growth_tracker, found_inf)
        elif self._is_updated_by_step:
            self._is_updated_by_step = False
            return
        else:
            raise ScalerStateError(
                "No inf checks were recorded prior to update: no optimizer with gradients was "
                "unscaled or stepped since the last update()."
            )
        self._ledger.end_iteration(scale, self._states.reports())
        self._per_optimizer_states = OptimizerStates()  # type: ignore[assignment]
        self._is_updated_by_step = False
        collapse = self._ledger.find_collapse(self._host_scale.seen, self._backoff_factor)
        if collapse is not None:
            warnings.warn(collapse, ScaleCollapseWarning, stacklevel=2)

    def _adjust_scale(self, scale: Tensor, growth_tracker: Tensor, found_inf: list[Tensor]) -> None:
        update_scale_(
            scale,
            growth_tracker,
            unscale.combine(found_inf, scale.device),
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
        )
        skipped = any_skipped(self._states.reports())
        self._host_scale.follow_update(scale, self._backoff_factor, skipped)
        if self._host_scale.lower_bound < self._floor:
            scale.clamp_min_(self._floor)
            self._host_scale.tell_floor(self._floor)

    def _set_scale(self, scale: Tensor, new_scale: float | Tensor) -> None:
        """Take over a scale that the user chose; it may lie below the floor, which then follows."""
        value: float | None
        if isinstance(new_scale, Tensor):
            tensor = arguments.new_scale_tensor(new_scale, self._device)
            scale.copy_(tensor)
            value = peek(tensor)
        else:
            value = arguments.positive_float(new_scale, "new_scale")
            scale.fill_(value)
        self._floor = min(self._min_scale, _SMALLEST_SCALE if value is None else value)
        self._host_scale.tell(value)
        self._ledger.set_scale(scale.clone() if value is None else value)

    def step_scheduler(self, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        """Step a learning-rate scheduler if the last step of its optimizer was not skipped.

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
            ScalerTypeError: this is no scheduler.
        """
        if not callable(getattr(scheduler, "step", None)):
            raise ScalerTypeError(
                f"expected a learning-rate scheduler; got {type(scheduler).__name__!r}."
            )
        if self._enabled and self._ledger.report_of(getattr(scheduler, "optimizer", None)).skipped:
            return False
        scheduler.step(*args, **kwargs)
        return True

    # What happened -------------------------------------------------------------------------------

    @property
    def last_step(self) -> StepReport | None:
        """What became of the newest step; None before the first and for a disabled scaler."""
        return self._ledger.last_step

    def history(self) -> list[UpdateRecord]:
        """Scale, skips and overflows of the last `history_size` updates, oldest first.

        May wait for the device. Parameters that overflowed are known where the scaler knew at once
        that the step was skipped, and where `last_step` was asked in time.
        """
        return self._ledger.history()

    def name_parameters(self, named_parameters: NamedParameters) -> None:
        """Learn what parameters are called, for reports and errors.

        Args:
            named_parameters: pairs of name and parameter, as `model.named_parameters()` gives.

        Raises:
            ScalerTypeError: there is something else in it.
        """
        self._names.add(named_parameters)

    # Settings and state --------------------------------------------------------------------------

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows; above 1."""
        self._growth_factor = arguments.growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale shrinks after an overflow; between 0 and 1."""
        self._backoff_factor = arguments.backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of updates without overflow after which the scale grows; at least 1."""
        self._growth_interval = arguments.growth_interval(new_interval)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch.amp.GradScaler returned.

        Raises:
            ScalerStateDictError: an entry is missing, not known or wrong. Nothing is loaded then.
        """
        if not self._enabled:
            return
        state = arguments.state_dict(state_dict)
        super().load_state_dict(state)
        self._floor = min(self._min_scale, state["scale"])
        self._host_scale.tell(state["scale"])
        self._ledger.set_scale(state["scale"])

    def __getstate__(self) -> dict[str, Any]:
        """Settings, scale and growth; not the names, the history or the last step."""
        if len(self._states):
            raise ScalerStateError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or "
                "at the end after scaler.update()."
            )
        state = super().__getstate__()
        for key in ("_names", "_host_scale", "_ledger", "_per_optimizer_states"):
            del state[key]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on from the saved scale and growth, on whatever device asks first."""
        super().__setstate__(state)
        self._start(state.get("_init_scale", 1.0))

    # Shared by the steps -------------------------------------------------------------------------

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise ScalerStateError(f"Attempted {funcname} but _scale is None. {_NOT_SCALED}")
        return self._scale, self._growth_tracker

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Check gradients without unscaling them; part of torch's contract with optimizers."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._states.of(optimizer)
        state.found_inf = unscale.check(group_gradients(optimizer, self._names, allow_fp16=True))
        return state.found_inf

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """What the checks found; part of torch's contract with optimizers."""
        return self._states.of(optimizer).found_inf

    def _begin_unscale(self, name: str, optimizer: Any) -> OptimizerState:
        self._check_scale_growth_tracker(name)
        state = self._states.of(arguments.optimizer(optimizer))
        if state.stage is OptState.UNSCALED:
            raise ScalerStateError(
                f"{name}() or another unscaling has already been called on this optimizer since "
                "the last update()."
            )
        if state.stage is OptState.STEPPED:
            raise ScalerStateError(f"{name}() is being called after step().")
        return state

    def _group(self, optimizer: Any, *, coalesce: bool = False) -> list[GradGroup]:
        return group_gradients(
            optimizer, self._names, allow_fp16=self._allow_fp16, coalesce=coalesce
        )

    def _inv_scale(self) -> Tensor:
        return cast("Tensor", self._scale).reciprocal()

    def _may_amplify(self) -> bool:
        """Whether the scale may be below 1, as far as is known without waiting."""
        return self._host_scale.lower_bound < 1.0

    def _unscaled(self, optimizer: Any, state: OptimizerState) -> None:
        state.stage = OptState.UNSCALED
        self._report(optimizer, state)

    def _stepped(self, optimizer: Any, state: OptimizerState) -> None:
        state.stage = OptState.STEPPED
        self._ledger.note_step(optimizer, self._report(optimizer, state))

    def _combine(self, found_inf: dict[torch.device, Tensor]) -> Tensor:
        return unscale.combine(found_inf.values(), cast("Tensor", self._scale).device)

    def _report(self, optimizer: Any, state: OptimizerState) -> StepReport:
        """The report on the checks that were made; looks at the gradients if some overflowed."""
        if state.report is None:
            alive = weakly(optimizer)
            names = self._names
            state.report = StepReport(
                self._combine(state.found_inf),
                lambda: count_overflows(names.of(owner)) if (owner := alive()) else (),
            )
        return state.report


def _widen(output: Tensor) -> Tensor:
    """To float32, where scaling overflows neither float16 nor, one day, anything narrower."""
    return output.float() if output.dtype in _LOW_DTYPES else output


def _map_nested(function: Callable[[Any], Any], value: Any) -> Any:
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


def _clip_(groups: list[GradGroup], max_norm: float, norm_type: float) -> Tensor:
    norm = unscale.total_norm(groups, norm_type)
    unscale.multiply_(groups, unscale.clip_factor(norm, max_norm))
    return norm.to(unscale.norm_dtype(groups))


def _refuse_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("closure") is not None or any(callable(arg) for arg in args):
        raise ScalerStateError("Closure use is not currently supported if GradScaler is enabled.")
