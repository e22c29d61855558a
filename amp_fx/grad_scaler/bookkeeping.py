"""The public methods of `GradScaler` that touch no gradient: reports, settings, state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_fx.errors import ScalerStateError, ScalerTypeError
from amp_fx.grad_scaler import arguments
from amp_fx.grad_scaler.core import ScalerCore

if TYPE_CHECKING:
    from amp_fx.grad_scaler.names import NamedParameters
    from amp_fx.grad_scaler.reports import StepReport, UpdateRecord


class Bookkeeping(ScalerCore):
    """What `GradScaler` tells, and what it is told."""

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
        if self._enabled and self._last_step_of(getattr(scheduler, "optimizer", None)).skipped:
            return False
        scheduler.step(*args, **kwargs)
        return True

    def _last_step_of(self, optimizer: Any) -> StepReport:
        state = self._states.known(optimizer)
        if state is None or state.last_step is None:
            raise ScalerStateError(
                "this scaler has not stepped the scheduler's optimizer yet; call "
                "scaler.step(optimizer) first."
            )
        return state.last_step

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
        self._limits.follow(state["scale"])
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
        for key in ("_names", "_host_scale", "_ledger", "_states"):
            del state[key]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on from the saved scale and growth, on whatever device asks first."""
        super().__setstate__(state)
        self._start(state.get("_init_scale", 1.0))
