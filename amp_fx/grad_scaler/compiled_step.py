"""Unscaling, checking, clipping and stepping as one compiled call that never waits for the device.

Adam, AdamW and SGD take the two passes of ``two_pass``. The rest of this file is for all others.

A skipped step cannot be a branch on the host. So the step always runs, and every tensor that it
wrote becomes `where(overflowed, old, new)`, which inductor fuses into the step's own kernels.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_fx.grad_scaler.eager_step import written_tensors
from amp_fx.grad_scaler.gradients import clip_factor, grads_of, norm_of_all, params_with_grads
from amp_fx.grad_scaler.processes import can_step_parts, stepping_parts
from amp_fx.grad_scaler.torch_private import bare_step, mark_kept_in_place, mark_stepped
from amp_fx.grad_scaler.two_pass import TwoPassStep, overflow_flag, total_norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.grad_scaler.gradients import GradGroup
    from amp_fx.grad_scaler.scaler import GradScaler
    from amp_fx.grad_scaler.two_pass import Work


class CompiledStep:
    """Unscales, checks, clips and steps in one call, once per iteration.

    Calls run eagerly, and may wait for the device, until the optimizer has its state: the first
    step creates it. So do, with one warning, calls for optimizers that keep numbers instead of
    tensors in their state, which nothing on the device can put back, and for sparse gradients or
    gradients on several devices. Fused optimizers that do not take two passes run eagerly too, and
    do not wait. An optimizer whose step reads values itself, as Adafactor's does, waits there.

    Where several processes have to agree, the call is two compiled ones, with the exchange of the
    flag and of the norm between them. DTensors are stepped part by part; optimizers that look at
    more than an element at a time (Muon, Adafactor, those of others) run eagerly on them.

    Put back on overflow are the parameters and the tensors in the optimizer's `state` and
    `param_groups`; a step that writes others cannot be compiled this way.

    Two passes write no gradients unless they are asked to; all others leave gradients unscaled and
    clipped. `GradScaler.compile_step` says which optimizers take them.

    On a device an optimizer with a `capturable` option gets it set, for its step counters have to
    be there. Its step hooks run also for steps that are undone.

    Attributes:
        norm: the norm of the unscaled gradients at the last call; None without `max_norm`.
    """

    def __init__(
        self,
        scaler: GradScaler,
        optimizer: Any,
        *,
        update_scale: bool,
        write_grads: bool,
        compile_options: dict[str, Any],
        **clipping: Any,
    ) -> None:
        """Compiles nothing yet; see `GradScaler.compile_step` for the arguments."""
        self.norm: Tensor | None = None
        self._scaler = scaler
        self._optimizer = optimizer
        self._update_scale = update_scale
        self._compile_options = compile_options
        self._compiled: Any = None
        self._num_compiled = 0
        self._params_with_state: set[int] = set()
        self._must_run_eagerly = False
        self._two_pass = TwoPassStep(
            optimizer, writes_grads=write_grads, compile_options=compile_options, **clipping
        )

    def __call__(self) -> Any:
        """Unscales, checks, clips, steps and updates the scale.

        Returns:
            What the optimizer's step returns; None if it was skipped.

        Raises:
            ScalerStateError: called before `scale`, or after `step` without `update`.
        """
        scaler, optimizer = self._scaler, self._optimizer
        if not scaler.is_enabled():
            work = self._work()
            if work is None:
                return self._step_eagerly()
            _, self.norm = self._two_pass(work)
            return None
        state = scaler._begin("step", optimizer)
        groups = scaler._group(optimizer) if state.stage is OptState.READY else []
        work = self._work() if groups else None
        result = None
        if work is not None:
            inv_scale = scaler._inv_scale(work.weights[0].device)
            found_inf, self.norm = self._two_pass(work, inv_scale)
            state.inv_scale = None if self._two_pass.writes_grads else inv_scale
            scaler._stepped(state, found_inf)
        elif self._can_run_compiled(groups):
            result = self._step_compiled(groups)
        else:
            result = self._step_eagerly()
        if self._update_scale:
            scaler.update()
            scaler._is_updated_by_step = True
        return result

    # In two passes -------------------------------------------------------------------------------

    def _work(self) -> Work | None:
        """Returns what a step in two passes works on; None where that cannot be."""
        if not self._scaler._agreement.is_alone(self._optimizer):
            return None
        work = self._two_pass.work()
        if work is None or not self._scaler.is_enabled():
            return work
        if all(count.device == work.weights[0].device for count in work.counts):
            return work
        _move_to_device(self._optimizer, work.weights)  # counters that were loaded
        return self._two_pass.work()

    # Eagerly -------------------------------------------------------------------------------------

    def _can_run_compiled(self, groups: list[GradGroup]) -> bool:
        if self._must_run_eagerly or not groups:
            return False
        params = params_with_grads(self._optimizer)
        if any(grad.layout is not torch.strided for grad in grads_of(params)):
            return self._give_up("its gradients are sparse")
        if len({group.device for group in groups}) > 1:
            return self._give_up("its gradients are on several devices")
        if not can_step_parts(self._optimizer):
            return self._give_up("its parameters are sharded over processes")
        return all(id(param) in self._params_with_state for param in params)

    def _give_up(self, reason: str, *, stacklevel: int = 4) -> bool:
        self._must_run_eagerly = True
        name = type(self._optimizer).__name__
        warnings.warn(
            f"steps of {name} run eagerly, because {reason}; the numbers are the same, but the "
            "host waits for the device.",
            stacklevel=stacklevel,
        )
        return False

    def _step_eagerly(self) -> Any:
        scaler, optimizer = self._scaler, self._optimizer
        if self._two_pass.max_norm is not None:
            self.norm = self._clip_eagerly(self._two_pass.max_norm)
        numbers = _numbers(optimizer)
        result = scaler.step(optimizer)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            self._must_run_eagerly = True  # and does not wait
        elif scaler.is_enabled() and not self._must_run_eagerly:
            self._note_state(numbers)
        return result

    def _clip_eagerly(self, max_norm: float) -> Tensor | None:
        scaler, optimizer = self._scaler, self._optimizer
        stage = scaler._states.of(optimizer).stage if scaler.is_enabled() else OptState.READY
        if stage is OptState.READY:
            return scaler.unscale_and_clip_(optimizer, max_norm, self._two_pass.norm_type)
        if stage is OptState.STEPPED:
            return None  # and the step will refuse
        return scaler._clip(optimizer, max_norm, self._two_pass.norm_type)

    def _note_state(self, numbers: dict[Any, Any]) -> None:
        """Notes that parameters with gradients have their state, unless the step was skipped."""
        report = self._scaler.last_step
        if report is None or report.skipped:
            return
        if numbers != _numbers(self._optimizer):
            self._give_up("its step counts in numbers, not in tensors", stacklevel=5)
            return
        params = params_with_grads(self._optimizer)
        _move_to_device(self._optimizer, params)
        self._params_with_state.update(map(id, params))

    # In one call, that puts back -----------------------------------------------------------------

    def _step_compiled(self, groups: list[GradGroup]) -> Any:
        scaler, optimizer = self._scaler, self._optimizer
        if self._compiled is None:
            functions = unscale_and_check, self._function()
            self._compiled = [torch.compile(f, **self._compile_options) for f in functions]
        inv_scale = scaler._inv_scale(groups[0].device)
        is_alone = scaler._agreement.is_alone(optimizer)
        found_inf, norm = (None, None) if is_alone else self._agreed(groups, inv_scale)
        with stepping_parts(optimizer), self._learning_rates_as_tensors():
            marked = self._marked()
            result, found_inf, self.norm = self._compiled[1](*marked, inv_scale, found_inf, norm)
        mark_stepped(optimizer)
        scaler._stepped(scaler._states.of(optimizer), found_inf)
        return result

    def _agreed(self, groups: list[GradGroup], inv_scale: Tensor) -> tuple[Tensor, Tensor | None]:
        """Unscales in a call of its own; returns the flag and the norm of all processes."""
        scaler, optimizer = self._scaler, self._optimizer
        grads = [grad for group in groups for grad in group.grads]
        mark_kept_in_place(grads)
        found_inf = self._compiled[0](grads, inv_scale)
        scaler._agreement.reduce_(found_inf, optimizer)
        if self._two_pass.max_norm is None:
            return found_inf, None
        return found_inf, norm_of_all(optimizer, groups, self._two_pass.norm_type)

    def _marked(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Returns parameters with gradients, all that a step writes, and the gradients."""
        params = params_with_grads(self._optimizer)
        written, grads = written_tensors(self._optimizer, params), grads_of(params)
        if self._num_compiled != len(params):  # what is compiled now sees the marks
            mark_kept_in_place([*written, *grads])
            self._num_compiled = len(params)
        return params, written, grads

    @contextlib.contextmanager
    def _learning_rates_as_tensors(self) -> Iterator[None]:
        """Makes the learning rates inputs of the compiled call.

        A number is a constant to the compiler: a schedule would compile anew at each change (SGD
        and RMSprop did). Left alone where torch refuses it: in foreach implementations that are
        not capturable. On a device it is filled there: a tensor on the host would keep inductor
        from making a CUDA graph of the call. Loops over parameters that are not capturable have it
        on the host, as they read it.
        """
        groups = [
            group
            for group in self._optimizer.param_groups
            if isinstance(group.get("lr"), float)
            and not (group.get("foreach") and not group.get("capturable", True))
        ]
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = _as_tensor(group)
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _function(self) -> Any:
        """Makes the function to compile; where processes agreed, it is given what they found."""
        optimizer, step = self._optimizer, bare_step(self._optimizer)
        max_norm, norm_type = self._two_pass.max_norm, self._two_pass.norm_type

        @torch.no_grad()
        def step_or_put_back(
            params: list[Tensor],
            written: list[Tensor],
            grads: list[Tensor],
            inv_scale: Tensor,
            found_inf: Tensor | None = None,
            norm: Tensor | None = None,
        ) -> tuple[Any, Tensor, Tensor | None]:
            if found_inf is None:
                found_inf = unscale_and_check(grads, inv_scale)
                norm = None if max_norm is None else total_norm(grads, norm_type)
            if norm is not None and max_norm is not None:
                factor = clip_factor(norm, max_norm, found_inf)
                for grad in grads:
                    grad.mul_(factor)
            overflowed = found_inf != 0
            old = [tensor.clone() for tensor in written]
            result = step()
            # Looked up again: a step may put new tensors in the place of old ones.
            for tensor, value in zip(written_tensors(optimizer, params), old, strict=True):
                tensor.copy_(torch.where(overflowed, value, tensor))
            return result, found_inf, norm

        return step_or_put_back


@torch.no_grad()
def unscale_and_check(grads: list[Tensor], inv_scale: Tensor) -> Tensor:
    """Multiplies gradients by `inv_scale`; returns 1.0 if one of them is not finite, else 0.0."""
    for grad in grads:
        grad.mul_(inv_scale)
    return overflow_flag(grads)


def _as_tensor(group: dict[str, Any]) -> Tensor:
    """Makes a tensor of a group's learning rate, without waiting; float32 at least."""
    params = group["params"]
    is_read = group.get("foreach") is False and not group.get("capturable")
    is_on_host = is_read or not params or params[0].is_cpu
    device = torch.device("cpu") if is_on_host else params[0].device
    dtypes = [param.dtype.to_real() for param in params]
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    return torch.full((), group["lr"], dtype=dtype, device=device)


def _numbers(optimizer: Any) -> dict[Any, Any]:
    """Lists all numbers that a step could count in: in groups, in the state, in the optimizer."""
    places = [vars(optimizer), *optimizer.param_groups, *optimizer.state.values()]
    return {
        (index, key): value
        for index, place in enumerate(places)
        for key, value in place.items()
        if isinstance(value, Number) and not isinstance(value, bool)  # flags count nothing
    }


def _move_to_device(optimizer: Any, params: list[Tensor]) -> None:
    """Brings step counters to the parameters' device, where they can be put back."""
    for group in optimizer.param_groups:
        if "capturable" in group and any(not param.is_cpu for param in group["params"]):
            group["capturable"] = True
    for param in params:
        state = optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != param.device and value.dim() == 0:
                state[key] = value.to(param.device)
