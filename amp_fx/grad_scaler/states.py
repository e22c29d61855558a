"""Records what happened to each optimizer since the last update and at its last step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import OptState

from amp_fx.errors import ScalerStateError
from amp_fx.grad_scaler import loss_scale
from amp_fx.grad_scaler.reports import FINITE, StepReport, count_overflows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from amp_fx.grad_scaler.gradients import Flags, ParameterNames


class OptimizerState:
    """Holds what a scaler knows of one optimizer, which it holds weakly."""

    def __init__(self, alive: Callable[[], Any]) -> None:
        """Starts where nothing has happened; `alive` gives the optimizer as long as it lives."""
        self.alive = alive
        self.last_step: StepReport | None = None
        self.begin_iteration()

    def begin_iteration(self) -> None:
        """Forgets the iteration; keeps the last step."""
        self.stage = OptState.READY
        self.found_inf: Flags = {}  # what the check found
        self.flag: Tensor | None = None  # all of that as one, on the scale's device
        self.had_gradients = True  # some process had; if none, nothing is known of the scale
        self.inv_scale: Tensor | None = None  # what the check left gradients to be multiplied by
        self.report: StepReport | None = None  # on the check

    def refuse_to_unscale_again(self, name: str) -> None:
        """Raises if the optimizer was unscaled or stepped in this iteration."""
        if self.stage is OptState.UNSCALED:
            raise ScalerStateError(
                f"{name}() or another unscaling has already been called on this optimizer since "
                "the last update()."
            )
        if self.stage is OptState.STEPPED:
            raise ScalerStateError(f"{name}() is being called after step().")

    def make_report(self, names: ParameterNames) -> StepReport:
        """Reports on the check that was made; looks at the gradients if some overflowed."""
        alive, factor = self.alive, self.inv_scale
        if self.flag is None or loss_scale.peek(self.flag) == 0.0:
            self.report = FINITE
        else:
            self.report = StepReport(
                self.flag,
                lambda: count_overflows(names.of(owner), factor) if (owner := alive()) else (),
            )
        return self.report


class OptimizerStates:
    """Holds the states of all optimizers.

    What an optimizer found before it died still counts for the update.
    """

    def __init__(self) -> None:
        """Knows no optimizer."""
        # By id, which another optimizer can get: an entry counts as long as its optimizer lives.
        self._entries: dict[int, OptimizerState] = {}
        self._in_use: list[OptimizerState] = []  # in this iteration, in the order of first use

    def __len__(self) -> int:
        """Counts the optimizers that an update is due for."""
        return sum(s.stage is not OptState.READY or s.flag is not None for s in self._in_use)

    def known(self, optimizer: Any) -> OptimizerState | None:
        """Returns the optimizer's state, or None if it was never asked for."""
        state = self._entries.get(id(optimizer))
        return state if state is not None and state.alive() is optimizer else None

    def of(self, optimizer: Any) -> OptimizerState:
        """Returns the optimizer's state, which from now on is in use."""
        state = self.known(optimizer)
        if state is None:
            state = self._entries[id(optimizer)] = OptimizerState(self._weakly(optimizer))
        if state not in self._in_use:
            self._in_use.append(state)
        return state

    def flags(self) -> list[Tensor]:
        """Lists all flags of this iteration that say something of the scale."""
        return [s.flag for s in self._in_use if s.had_gradients and s.flag is not None]

    def any_checked(self) -> bool:
        """Returns whether any optimizer was unscaled or stepped in this iteration."""
        return any(state.flag is not None for state in self._in_use)

    def reports(self) -> tuple[StepReport, ...]:
        """Lists what is known of each optimizer's gradients in this iteration."""
        return tuple([s.report for s in self._in_use if s.report is not None])

    def begin_iteration(self) -> None:
        """Forgets flags and reports."""
        for state in self._in_use:
            state.begin_iteration()
        self._in_use.clear()

    def _weakly(self, optimizer: Any) -> Callable[[], Any]:
        """Returns a call that gives the optimizer as long as it lives; with it goes its entry."""
        entries, key = self._entries, id(optimizer)

        def forget(reference: Any) -> None:
            if key in entries and entries[key].alive is reference:
                del entries[key]

        try:
            return weakref.ref(optimizer, forget)
        except TypeError:  # an object with __slots__
            return lambda: optimizer
