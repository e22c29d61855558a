"""``GradScaler``: ``torch.amp.GradScaler`` with reports and limits of the scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_fx.errors import OptionError, ScalerAssertionError, ScalerStateError
from amp_fx.grad_scaler import arguments
from amp_fx.grad_scaler.gradients import (
    clip_,
    grads_of,
    grouped_grads,
    has_nonzero_grads,
    moved,
    params_of,
    unscale_,
)
from amp_fx.grad_scaler.reports import ParameterNames, StepReport, count_overflows
from amp_fx.grad_scaler.scale_bound import ScaleBound
from amp_fx.grad_scaler.scale_update import ScaleState, updated
from amp_fx.reports import first_of
from amp_fx.torch_private.optimizers import (
    is_fused,
    is_step_observed,
    restored_on_error,
    states_with_momentum,
)
from amp_fx.torch_private.pytree import tree_map

if TYPE_CHECKING:
    from amp_fx.grad_scaler.reports import NamedParameters

Outputs = TypeVar("Outputs")

_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class GradScaler(torch.amp.GradScaler):
    """A :class:`torch.amp.GradScaler` that reports overflows.

    Methods, defaults, state dict and errors are the same as torch's::

        scaler = amp_fx.GradScaler(named_parameters=model.named_parameters())
        for inputs, targets in data:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_and_clip_(optimizer, max_norm=1.0)  # optional
            scaler.step(optimizer)  # skipped if gradients overflowed
            scaler.update()
            if not scaler.last_step.skipped:
                scheduler.step()

    Differences from `torch.amp.GradScaler`:

    * `last_step`, `last_step_of` and error messages name the parameters that overflowed.
    * A skipped step is never called if a hook or a wrapper of the optimizer's `step` would see it,
      as that of Accelerate. torch's calls a fused optimizer's step also after an overflow.
    * The scale does not shrink below `min_scale`; torch's scale may reach 0.
    * Detects gradients that overflow when they are unscaled by a scale below 1.
    * A step without gradients calls the optimizer and does not change the scale; torch's asserts.
    * Recovers if an iteration ends between `unscale_` and `update`, such as by an exception. With
      torch's, each later `unscale_` raises, and a `step` may apply gradients that are still scaled.
    * `step` raises an error if a closure is passed by position; torch's runs the closure.
    * Supports bfloat16 and complex gradients on every device, and plain gradients together with
      DTensors.

    Args:
        device: Device type of the losses, such as "cuda" or "cpu". Without a CUDA device, a "cuda"
            scaler warns and disables itself.
        init_scale: The initial scale.
        growth_factor: Factor by which the scale grows after `growth_interval` consecutive updates
            without overflow; above 1 and finite.
        backoff_factor: Factor by which the scale shrinks after an overflow; between 0 and 1.
        growth_interval: Number of consecutive updates without overflow before the scale grows; at
            least 1.
        enabled: If False, the scaler only steps optimizers.
        named_parameters: Pairs of name and parameter for reports. Not needed for optimizers that
            were constructed with named parameters.
        allow_fp16: Whether gradients may be float16.
        min_scale: Lower limit of the scale; at most `init_scale`. A lower scale can be set by
            `update` or loaded, but does not shrink further.
        max_scale: Upper limit of the scale, or None; at least `init_scale`. A higher scale can be
            set by `update` or loaded, but does not grow further.
        hysteresis: The scale backs off from this consecutive update with an overflow on. Steps
            are skipped after every overflow.

    Raises:
        OptionError: An argument has an invalid value.
        ScalerAssertionError: `growth_factor` or `backoff_factor` has an invalid value.
    """

    last_step: StepReport | None = None
    """Report on the latest step of any optimizer; None before the first step and if disabled."""

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
    ) -> None:
        initial = arguments.scale(init_scale, "init_scale")
        self._min_scale, self._max_scale = arguments.limits(min_scale, max_scale, initial)
        self._hysteresis = arguments.count(hysteresis, "hysteresis")
        self._allow_fp16 = allow_fp16
        super().__init__(
            torch.device(device).type,
            initial,
            arguments.growth_factor(growth_factor),
            arguments.backoff_factor(backoff_factor),
            arguments.count(growth_interval, "growth_interval"),
            enabled,
        )
        self._init_num_overflows = 0
        self._num_overflows: Tensor | None = None
        self._start()
        if named_parameters is not None:
            self.name_parameters(named_parameters)

    def _start(self) -> None:
        """Creates the attributes that pickles do not contain."""
        self._bound = ScaleBound(vars(self).get("_init_scale", 1.0))  # unset if disabled
        self._names = ParameterNames()
        self._reports: list[StepReport] = []
        self._last_steps: WeakKeyDictionary[Any, StepReport] = WeakKeyDictionary()
        self._unfinished: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        """Returns the scale and the latest report; does not wait for the device."""
        if not self._enabled:
            return "GradScaler(enabled=False)"
        scale: Any = self._init_scale if self._scale is None else "<on the device>"
        if self._scale is not None and self._scale.is_cpu:
            scale = self._scale.item()
        return f"GradScaler(scale={scale}, last_step={self.last_step})"

    def name_parameters(self, named_parameters: NamedParameters) -> None:
        """Adds names of parameters for reports and errors.

        Args:
            named_parameters: Pairs of name and parameter, such as `model.named_parameters()`.

        Raises:
            ArgumentTypeError: An item is not such a pair.
        """
        self._names.add(named_parameters)

    def last_step_of(self, optimizer: torch.optim.Optimizer) -> StepReport:
        """Returns the report on an optimizer's latest step, for loops with several optimizers.

        An optimizer that was not stepped, and one of a disabled scaler, has skipped nothing::

            if not scaler.last_step_of(scheduler.optimizer).skipped:
                scheduler.step()

        Args:
            optimizer: The optimizer, as it was passed to `step`.
        """
        return self._last_steps.get(optimizer) or StepReport()

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiplies outputs by the scale.

        Args:
            outputs: A tensor, or tensors in lists, tuples, dicts and other iterables.
        """
        if not self._enabled:
            return outputs
        for report in self._reports:
            report.close()
        self._reports.clear()
        for state in self._per_optimizer_states.values():
            _find_unfinished(state)
        return cast("Outputs", tree_map(super().scale, outputs))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides gradients by the scale; `step` does so if this was not called.

        Args:
            optimizer: The optimizer whose gradients to unscale, once per optimizer and update.

        Raises:
            ScalerStateError: The gradients were unscaled or stepped since the last `update`. If
                they were cleared since then, the scaler starts a new iteration.
        """
        if self._enabled:
            stage = self._per_optimizer_states.get(id(optimizer), {}).get("stage")
            if stage is OptState.UNSCALED:
                raise self._order_error(
                    optimizer,
                    "unscale_() has already been called on this optimizer since the last update().",
                )
            if stage is OptState.STEPPED:
                raise self._order_error(optimizer, "unscale_() is being called after step().")
        super().unscale_(optimizer)

    def unscale_and_clip_(
        self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Calls `unscale_` and clips the norm of the gradients; does not wait for the device.

        Clips like torch.nn.utils.clip_grad_norm_. On accelerators, gradients that overflowed are
        not clipped, so that `last_step` can still count them.

        Args:
            optimizer: The optimizer whose gradients to unscale, once per optimizer and update.
            max_norm: The maximum norm; infinity measures the norm without clipping.
            norm_type: The order of the norm.

        Returns:
            The norm of the unscaled gradients before clipping: 0-dim, at least float32.

        Raises:
            OptionError: `max_norm` is negative or not a number.
        """
        max_norm, norm_type = arguments.clipping(max_norm, norm_type)
        self.unscale_(optimizer)
        return clip_(params_of(optimizer), max_norm, norm_type)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps the optimizer unless its gradients overflowed; unscales them first if necessary.

        Fused optimizers unscale and skip in their kernels. For other optimizers, the host waits for
        the check. It also waits if a fused optimizer has hooks, or a library has wrapped its
        `step`, because a skipped step must not call them; and for the first step of fused SGD with
        momentum: torch allocates the momentum buffers without initializing them, and a skipped step
        does not write them, so they are dropped.

        Args:
            optimizer: The optimizer to step, once per update.
            args: Positional arguments of the optimizer's step.
            kwargs: Keyword arguments of the optimizer's step.

        Returns:
            The result of the optimizer's step; None if the step was skipped.

        Raises:
            ScalerStateError: A closure was passed; or the optimizer was stepped since the last
                `update`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(map(callable, args)):
            raise ScalerStateError(
                "Closure use is not currently supported if GradScaler is enabled."
            )
        state = self._per_optimizer_states.get(id(optimizer), {})
        if state.get("stage") is OptState.STEPPED:
            raise self._order_error(
                optimizer, "step() has already been called since the last update()."
            )
        if state.get("is_unfinished"):
            self._drop_unfinished(optimizer)  # otherwise the new gradients would remain scaled
        if state.get("is_mixed"):
            raise self._order_error(
                optimizer,
                "An exception interrupted step() after it unscaled the gradients, and backward() "
                "has added scaled gradients to them: clear the gradients.",
            )
        is_unscaled = state.get("stage") is OptState.UNSCALED and not state.get("is_unfinished")
        had_momentum = set(map(id, states_with_momentum(optimizer)))
        try:
            with restored_on_error(optimizer):
                is_visible = is_fused(optimizer) and is_step_observed(optimizer)
                if is_visible and self._overflowed(optimizer):
                    self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
                    result = None
                else:
                    result = super().step(optimizer, *args, **kwargs)
        finally:
            state = self._per_optimizer_states.get(id(optimizer), {})
            if state:
                state["is_unscaled_by_step"] = not is_unscaled
            report = state.get("report") or StepReport()
            new = [s for s in states_with_momentum(optimizer) if id(s) not in had_momentum]
            if new and report.skipped:
                for buffers in new:
                    del buffers["momentum_buffer"]
        self.last_step = self._last_steps[optimizer] = report
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale: backs it off after an overflow, or grows it.

        Call it once per iteration, after all steps. Does not wait for the device. Ignores
        optimizers without gradients.

        Args:
            new_scale: If passed, becomes the scale. A tensor is copied.

        Raises:
            ScalerAssertionError: No optimizer was unscaled or stepped since the last update.
            OptionError: `new_scale` is not a valid scale.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            is_on_device = isinstance(new_scale, Tensor) and not new_scale.is_cpu
            lower_bound = 0.0 if is_on_device else arguments.scale(new_scale, "new_scale")
            super().update(new_scale.squeeze() if isinstance(new_scale, Tensor) else lower_bound)
            self._forget_overflows(lower_bound)
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        states = [*self._per_optimizer_states.values(), *self._unfinished]
        states = [state for state in states if state["found_inf_per_device"]]
        if not states:
            raise ScalerAssertionError(
                "No inf checks were recorded prior to update: no optimizer was unscaled or stepped "
                "since the last update()."
            )
        flags = [
            moved(flag, scale.device)
            for state in states
            if state["has_grads"]
            for flag in state["found_inf_per_device"].values()
        ]
        if flags:
            assert self._num_overflows is not None
            old = ScaleState(scale, growth_tracker, self._num_overflows)
            new = updated(
                old,
                sum(flags[1:], flags[0]),
                growth_factor=self._growth_factor,
                backoff_factor=self._backoff_factor,
                growth_interval=self._growth_interval,
                min_scale=self._min_scale,
                max_scale=self._max_scale,
                hysteresis=self._hysteresis,
            )
            for tensor, value in zip(old, new, strict=True):
                tensor.copy_(value)  # CUDA graphs read the scale at its address
            self._bound.follow(scale, self._backoff_factor, self._min_scale)
        self._per_optimizer_states.clear()
        self._unfinished.clear()

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale grows; above 1 and finite."""
        super().set_growth_factor(arguments.growth_factor(new_factor))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale shrinks; between 0 and 1."""
        super().set_backoff_factor(arguments.backoff_factor(new_factor))

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the number of consecutive updates before the scale grows; at least 1."""
        super().set_growth_interval(arguments.count(new_interval, "growth_interval"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state dict of this class or of torch.amp.GradScaler.

        Numbers may be tensors with one element, as in some checkpoints.

        Raises:
            OptionError: An entry is missing or has an invalid value. Nothing is loaded.
            ScalerAssertionError: A factor has an invalid value. Nothing is loaded.
            RuntimeError: The state dict is empty.
        """
        missing = [key for key in _STATE if key not in state_dict]
        if self._enabled and state_dict and missing:
            raise OptionError(f"entries are missing in the scaler's state dict: {missing}")
        numbers = {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in state_dict.items()
        }
        if self._enabled and state_dict:
            arguments.scale(numbers["scale"], "scale")
            arguments.growth_factor(numbers["growth_factor"])
            arguments.backoff_factor(numbers["backoff_factor"])
            arguments.count(numbers["growth_interval"], "growth_interval")
            arguments.count(numbers["_growth_tracker"], "_growth_tracker", least=0)
        super().load_state_dict(numbers)
        if self._enabled:
            self._forget_overflows(self._init_scale)

    def __getstate__(self) -> dict[str, Any]:
        """Returns settings, scale and counters, without names and reports."""
        state = super().__getstate__()
        if self._num_overflows is not None:
            state["_init_num_overflows"] = int(self._num_overflows.item())
            state["_num_overflows"] = None
        for name in (
            "_bound", "_last_steps", "_names", "_reports", "_unfinished", "last_step",
        ):  # fmt: skip
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores settings, scale and counters."""
        super().__setstate__(state)
        self._start()

    def _overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Waits for the check of an optimizer's gradients, and checks them if necessary."""
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self._check_scale_growth_tracker("step")
            self._check_inf_per_device(optimizer)
        return bool(state["report"].skipped)

    def _forget_overflows(self, scale: float) -> None:
        """Resets the bound and the overflow count after the scale was set."""
        self._bound = ScaleBound(scale)
        self._unfinished.clear()
        self._init_num_overflows = 0
        if self._num_overflows is not None:
            self._num_overflows.zero_()

    def _order_error(self, optimizer: torch.optim.Optimizer, message: str) -> ScalerStateError:
        """Returns an error about a missing ``update``; prepares the next call to succeed."""
        if self._per_optimizer_states[id(optimizer)].get("is_unfinished"):
            self._drop_unfinished(optimizer)
        return ScalerStateError(
            f"{message} Call update() once in every iteration, also if step() was left out or an "
            "exception ended the iteration."
        )

    def _drop_unfinished(self, optimizer: torch.optim.Optimizer) -> None:
        """Forgets that gradients were checked that no longer exist; `update` counts the check."""
        self._unfinished.append(self._per_optimizer_states.pop(id(optimizer)))

    # Overridden hooks of torch's methods ---------------------------------------------------------

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._num_overflows = torch.full(
            (), self._init_num_overflows, dtype=torch.int32, device=dev
        )

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscales, checks and reports gradients; an ``inv_scale`` of 1 only checks them."""
        groups = grouped_grads(params_of(optimizer))
        is_float16_allowed = allow_fp16 or self._allow_fp16
        if not is_float16_allowed and any(grads[0].dtype is torch.float16 for grads in groups):
            raise self._float16_error(optimizer)
        full_inv_scale = self._inv_scale() if self._bound.value < 1.0 else None
        flags = unscale_(groups, inv_scale, found_inf, full_inv_scale)
        remaining = None if full_inv_scale is None else full_inv_scale / inv_scale
        self._per_optimizer_states[id(optimizer)]["has_grads"] = bool(groups)
        self._report(optimizer, flags, remaining)
        return flags

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        is_skipped = optimizer_state["report"].skipped
        return None if is_skipped else optimizer.step(*args, **kwargs)

    def _float16_error(self, optimizer: Any) -> OptionError:
        named = [(name, param.grad) for name, param in self._names.of(optimizer)]
        names = [name for name, grad in named if grad is not None and grad.dtype is torch.float16]
        shown = ", ".join(first_of(names, 8))
        return OptionError(
            f"Attempting to unscale FP16 gradients of {shown}. Use float32 parameters "
            "with torch.autocast, or construct the scaler with allow_fp16=True (unscaled float16 "
            "gradients may underflow to zero)."
        )

    def _report(
        self, optimizer: Any, flags: dict[torch.device, Tensor], factor: Tensor | None
    ) -> None:
        """Adds the report on a check; ``factor`` is the remaining factor for unscaling."""
        report = StepReport(
            flags.values(), lambda: count_overflows(self._names.of(optimizer), factor)
        )
        self._reports.append(report)
        # The state is stored by id, so it must prevent the optimizer from being freed.
        self._per_optimizer_states[id(optimizer)].update(report=report, optimizer=optimizer)

    def _inv_scale(self) -> Tensor:
        assert self._scale is not None
        return self._scale.reciprocal()


def _find_unfinished(state: dict[str, Any]) -> None:
    """Looks for gradients of an iteration that ended before ``update``, when the next one begins.

    If the gradients that were checked no longer exist, they were cleared for the next iteration.
    Only waits for the device if gradients were unscaled and not stepped, which is rare here.
    """
    if state["stage"] is OptState.READY:
        return
    params = params_of(state["optimizer"])
    if state["stage"] is OptState.STEPPED:
        state["is_unfinished"] = not grads_of(params)
        return
    state["is_unfinished"] = not has_nonzero_grads(params)
    state["is_mixed"] = not state["is_unfinished"] and state.get("is_unscaled_by_step", False)
