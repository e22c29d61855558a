"""What the scaler and its ways to step share: the scale, the states, the checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_fx.errors import ScalerStateError
from amp_fx.grad_scaler import arguments, host_scale, unscale
from amp_fx.grad_scaler.agreement import any_dtensor, norm_together, params_of
from amp_fx.grad_scaler.gradients import GradGroup, group_gradients
from amp_fx.grad_scaler.host_scale import HostScale
from amp_fx.grad_scaler.ledger import Ledger
from amp_fx.grad_scaler.names import ParameterNames
from amp_fx.grad_scaler.pipelines import norm_of_all
from amp_fx.grad_scaler.reports import StepReport, count_overflows
from amp_fx.grad_scaler.states import OptimizerState, OptimizerStates

if TYPE_CHECKING:
    from amp_fx.grad_scaler.agreement import Agreement
    from amp_fx.grad_scaler.limits import Limits

_NOT_SCALED = (
    "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the "
    "iteration."
)


_FINITE = StepReport()
"""Shared by all steps that are known to have gone well."""


class ScalerCore(torch.amp.GradScaler):
    """The inner half of `GradScaler`."""

    _limits: Limits
    _agreement: Agreement
    _history_size: int
    _allow_fp16: bool

    def _start(self, init_scale: float) -> None:
        """Set up what belongs to this process and is never saved."""
        self._states = OptimizerStates()
        self._names = ParameterNames()
        self._host_scale = HostScale(init_scale)
        self._ledger = Ledger(init_scale, self._history_size)
        self._is_updated_by_step = False

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise ScalerStateError(f"Attempted {funcname} but _scale is None. {_NOT_SCALED}")
        return self._scale, self._growth_tracker

    def _begin(self, name: str, optimizer: Any) -> OptimizerState:
        """The optimizer's state, for a call that needs a scale."""
        if self._states.known(optimizer) is None:
            arguments.optimizer(optimizer)
        if self._scale is None:
            if not self._agreement.is_alone(optimizer):
                # A process that had no loss must not leave the others waiting for its flag.
                self._lazy_init_scale_growth_tracker(params_of(optimizer)[0].device)
            self._check_scale_growth_tracker(name)
        return self._states.of(optimizer)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Check gradients without unscaling them; part of torch's contract with optimizers."""
        state = self._begin("_check_inf_per_device", optimizer)
        state.inv_scale = self._inv_scale() if self._may_amplify() else None
        found_inf = unscale.check(self._group(optimizer, allow_fp16=True), state.inv_scale)
        return self._found(optimizer, state, found_inf)

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """What the checks found; part of torch's contract with optimizers."""
        return self._states.of(optimizer).found_inf

    def _begin_unscale(self, name: str, optimizer: Any) -> OptimizerState:
        state = self._begin(name, optimizer)
        if state.stage is OptState.UNSCALED:
            raise ScalerStateError(
                f"{name}() or another unscaling has already been called on this optimizer since "
                "the last update()."
            )
        if state.stage is OptState.STEPPED:
            raise ScalerStateError(f"{name}() is being called after step().")
        return state

    def _group(
        self, optimizer: Any, *, coalesce: bool = False, allow_fp16: bool = False
    ) -> list[GradGroup]:
        allow_fp16 = allow_fp16 or self._allow_fp16
        return group_gradients(optimizer, self._names, allow_fp16=allow_fp16, coalesce=coalesce)

    def _clip(self, optimizer: Any, max_norm: float, norm_type: float) -> Tensor:
        """Clip gradients that are not scaled, or not any longer; returns their norm."""
        groups = self._group(optimizer, allow_fp16=True, coalesce=True)
        return unscale.clip_(groups, max_norm, self._norm(optimizer, groups, norm_type))

    def _norm(self, optimizer: Any, groups: list[GradGroup], norm_type: float) -> Tensor:
        """The norm of gradients that are not scaled: those of all shards, and of all stages."""
        params = params_of(optimizer)
        are_spread = any_dtensor(params)
        norm = norm_together(params, norm_type) if are_spread else unscale.norm(groups, norm_type)
        return norm_of_all(norm, norm_type, self._agreement.pipelines(optimizer))

    def _inv_scale(self) -> Tensor:
        assert self._scale is not None
        return self._scale.reciprocal()

    def _may_amplify(self) -> bool:
        """Whether the scale may be below 1, as far as is known without waiting."""
        return self._host_scale.lower_bound < 1.0

    def _found(
        self, optimizer: Any, state: OptimizerState, found_inf: dict[torch.device, Tensor]
    ) -> dict[torch.device, Tensor]:
        """Keep what a check found: here, or in any process that takes part.

        Without gradients nothing was infinite, and the scale is not shown to be good.
        """
        is_alone = self._agreement.is_alone(optimizer)
        state.had_gradients = bool(found_inf) or not is_alone
        if not found_inf or not is_alone:
            flag = self._combine(found_inf)
            self._agreement.reduce_(flag, optimizer)
            found_inf = {flag.device: flag}
        state.found_inf = found_inf
        return found_inf

    def _unscaled(
        self, optimizer: Any, state: OptimizerState, found_inf: dict[torch.device, Tensor]
    ) -> None:
        self._found(optimizer, state, found_inf)
        state.stage = OptState.UNSCALED
        self._report(state)

    def _stepped(self, state: OptimizerState) -> None:
        state.stage = OptState.STEPPED
        state.last_step = self._ledger.last_step = state.report or self._report(state)

    def _combine(self, found_inf: dict[torch.device, Tensor]) -> Tensor:
        assert self._scale is not None
        return unscale.combine(list(found_inf.values()), self._scale.device)

    def _report(self, state: OptimizerState) -> StepReport:
        """A report on the checks that were made; looks at the gradients if some overflowed."""
        if host_scale.peek(flag := self._combine(state.found_inf)) == 0.0:
            state.report = _FINITE
            return _FINITE
        alive, names, factor = state.alive, self._names, state.inv_scale
        state.report = StepReport(
            flag,
            lambda: count_overflows(names.of(owner), factor) if (owner := alive()) else (),
        )
        return state.report

    def _adjust_scale(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_inf: list[Tensor],
        was_skipped: bool | None,
    ) -> None:
        limits, on_host = self._limits, self._host_scale
        factors = (self._growth_factor, self._backoff_factor, self._growth_interval)
        flag = unscale.combine(found_inf, scale.device)
        limits.adjust_(scale, growth_tracker, flag, factors)
        on_host.follow_update(scale, self._backoff_factor, was_skipped)
        if on_host.lower_bound < limits.floor:
            scale.clamp_min_(limits.floor)
            on_host.tell_floor(limits.floor)

    def _set_scale(self, scale: Tensor, new_scale: float | Tensor) -> None:
        """Take over a scale that the user chose; it may lie below the floor, which then follows."""
        value: float | None
        if isinstance(new_scale, Tensor):
            tensor = arguments.new_scale_tensor(new_scale, self._device)
            scale.copy_(tensor)
            value = host_scale.peek(tensor)
        else:
            value = arguments.positive_float(new_scale, "new_scale")
            scale.fill_(value)
        self._limits.follow(scale if value is None else value)
        self._host_scale.tell(value)
        self._ledger.forget_peak(value)
