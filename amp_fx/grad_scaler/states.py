"""What has happened to each optimizer since the last update of the scale."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.amp.grad_scaler import OptState

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from amp_fx.grad_scaler.reports import StepReport

Value = TypeVar("Value")


class ByOptimizer(Generic[Value]):
    """Values by the optimizer itself, held weakly, not by its ``id``, which another one can get."""

    def __init__(self) -> None:
        """Start empty."""
        self._entries: dict[int, tuple[Callable[[], Any], Value]] = {}

    def get(self, optimizer: Any) -> Value | None:
        """The optimizer's value, or None."""
        entry = self._entries.get(id(optimizer))
        return entry[1] if entry is not None and entry[0]() is optimizer else None

    def set(self, optimizer: Any, value: Value) -> None:
        """Keep a value for as long as the optimizer lives."""
        self._entries[id(optimizer)] = (weakly(optimizer), value)


@dataclass
class OptimizerState:
    """One optimizer's part in the current iteration; ``alive`` gives the optimizer while it is."""

    alive: Callable[[], Any]
    stage: OptState = OptState.READY
    found_inf: dict[torch.device, Tensor] = field(default_factory=dict)
    report: StepReport | None = None


class OptimizerStates:
    """The states of all optimizers in this iteration.

    What an optimizer found before it died still counts for the update.
    """

    def __init__(self) -> None:
        """Start an iteration in which nothing has happened."""
        self._states: list[OptimizerState] = []
        self._by_optimizer: ByOptimizer[OptimizerState] = ByOptimizer()

    def __len__(self) -> int:
        """How many optimizers an update is due for."""
        return sum(s.stage is not OptState.READY or bool(s.found_inf) for s in self._states)

    def found_infs(self) -> list[Tensor]:
        """All flags of this iteration."""
        return [flag for state in self._states for flag in state.found_inf.values()]

    def reports(self) -> tuple[StepReport, ...]:
        """What is known of each optimizer's gradients."""
        return tuple([s.report for s in self._states if s.report is not None])

    def of(self, optimizer: Any) -> OptimizerState:
        """The optimizer's state; a fresh one if nothing has happened to it yet."""
        state = self._by_optimizer.get(optimizer)
        if state is None:
            state = OptimizerState(weakly(optimizer))
            self._states.append(state)
            self._by_optimizer.set(optimizer, state)
        return state


def weakly(optimizer: Any) -> Callable[[], Any]:
    """A call that gives the optimizer as long as it lives, None from then on."""
    try:
        return weakref.ref(optimizer)
    except TypeError:  # an object with __slots__
        return lambda: optimizer
