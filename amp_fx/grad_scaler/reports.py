"""Which steps were skipped, because of which parameters, and what that says of the scale.

``OptimizerStates`` records what happened to each optimizer since the last update.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_fx.errors import ScalerStateError
from amp_fx.grad_scaler import loss_scale
from amp_fx.grad_scaler.gradients import listing, sparse_values
from amp_fx.grad_scaler.processes import local

if TYPE_CHECKING:
    from collections.abc import Callable

    from amp_fx.grad_scaler.gradients import Flags, ParameterNames


# The scale has collapsed when it is below 1 and this many backoffs below where it was at its
# highest: a model that merely starts with too large a scale settles long before.
_BACKOFFS_TO_COLLAPSE = 16
# Where a floor keeps it from that, it has collapsed after more overflows than this in a row.
_OVERFLOWS_TO_COLLAPSE = 16
# A float16 loss has a float16 gradient, which is the scale: beyond this it is infinite. Below, this
# many overflows before the first good step are still the loss's.
_FLOAT16_MAX = torch.finfo(torch.float16).max
_OVERFLOWS_OF_LOSS = 3


@dataclass(frozen=True)
class Overflow:
    """Describes a parameter whose gradient was not finite.

    Attributes:
        name: of the parameter.
        num_inf: how many elements of its gradient were infinite.
        num_nan: how many were not a number.
        numel: how many elements the gradient has.
    """

    name: str
    num_inf: int
    num_nan: int
    numel: int

    def __str__(self) -> str:
        """Returns `layer.weight (3 inf, 1 nan of 64)`."""
        return f"{self.name} ({self.num_inf} inf, {self.num_nan} nan of {self.numel})"


@dataclass(frozen=True)
class UpdateRecord:
    """Describes one iteration, from the first `scale` to `update`.

    Attributes:
        scale: the scale in use.
        new_scale: the scale from then on.
        skipped: whether a step was skipped.
        overflows: the parameters that overflowed, as far as known.
    """

    scale: float
    new_scale: float
    skipped: bool
    overflows: tuple[Overflow, ...]


class StepReport:
    """Tells what became of one step. Looks nothing up before it is asked for.

    Asking whether the step was skipped waits for the device where the scaler itself did not have
    to. Asking which parameters overflowed reads their gradients, so it has to happen before these
    are cleared, or before `scale` starts the next iteration; where the scaler knows at once that
    the step was skipped, it has read them already.

    Attributes:
        known_skipped: `skipped` where that is known without waiting, else None.
    """

    def __init__(
        self,
        found_inf: Tensor | None = None,
        count: Callable[[], tuple[Overflow, ...]] | None = None,
    ) -> None:
        """Reports on a check of gradients; without one, on a step that nothing could skip."""
        self._found_inf = found_inf
        self._count = count
        self._overflows: tuple[Overflow, ...] | None = None
        self.known_skipped: bool | None = False
        if found_inf is not None:
            value = loss_scale.peek(found_inf)
            self.known_skipped = None if value is None else value != 0.0
        if self.known_skipped:
            self.look()

    @property
    def skipped(self) -> bool:
        """Whether the optimizer was kept from stepping; may wait for the device."""
        if self.known_skipped is None:
            assert self._found_inf is not None
            self.known_skipped = loss_scale.wait_for(self._found_inf) != 0.0
        return self.known_skipped

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """The parameters whose gradients were not finite; may wait for the device.

        Empty after a skipped step if the gradients were gone when this was first asked for.
        """
        if self.skipped:
            self.look()
        return self._overflows or ()

    def close(self) -> None:
        """Forgets the gradients, which are no longer those of this step."""
        self._count = None

    def look(self) -> None:
        """Finds out which parameters overflowed, as long as the gradients are there."""
        if self._overflows is None and self._count is not None:
            self._overflows = self._count()
        self._count = None

    def __repr__(self) -> str:
        """Returns what is known, without looking anything up."""
        if self.known_skipped is None:
            return "StepReport(skipped=<on the device>)"
        if not self.known_skipped:
            return "StepReport(skipped=False)"
        return f"StepReport(skipped=True, overflows=[{describe(self._overflows or ())}])"


FINITE = StepReport()
"""Shared by all steps that are known to have gone well."""


def describe(overflows: tuple[Overflow, ...]) -> str:
    """Names the first few parameters in one line."""
    return listing([*map(str, overflows)]) if overflows else "parameters not known"


@torch.no_grad()
def count_overflows(
    named_params: list[tuple[str, Tensor]], factor: Tensor | None = None
) -> tuple[Overflow, ...]:
    """Counts what is not finite in the gradients of parameters; waits for the device.

    Two waits per device: one to find the gradients, one to count in those that were found. If there
    is a `factor`, it counts in the gradients times this.
    """
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, param in named_params:
        if (grad := param.grad) is None:
            continue
        is_dense = grad.layout is torch.strided
        values = local(grad) if is_dense else sparse_values(grad, coalesce=True)
        if values.numel():
            values = values if factor is None else values * factor.to(values.device)
            by_device.setdefault(values.device, []).append((name, values))
    return tuple(o for named_grads in by_device.values() for o in _count(named_grads))


def _count(named_grads: list[tuple[str, Tensor]]) -> list[Overflow]:
    norms = torch.stack([torch.linalg.vector_norm(grad, math.inf) for _, grad in named_grads])
    are_finite = norms.isfinite().tolist()
    bad = [each for each, is_finite in zip(named_grads, are_finite, strict=True) if not is_finite]
    if not bad:
        return []
    counts = torch.stack([torch.stack([g.isinf().sum(), g.isnan().sum()]) for _, g in bad]).tolist()
    return [
        Overflow(name, num_inf, num_nan, grad.numel())
        for (name, grad), (num_inf, num_nan) in zip(bad, counts, strict=True)
    ]


class Ledger:
    """Remembers the last step and the last updates, and notices when the scale has collapsed."""

    def __init__(self, scale: float, size: int) -> None:
        """Remembers up to `size` updates of a scale that starts here."""
        self.last_step: StepReport | None = None
        self._updates: deque[Any] = deque(maxlen=size)  # old and new scale, and reports, of each
        self._last_reports: tuple[StepReport, ...] = ()
        self._has_warned = False
        self._is_loss_float16: bool | None = False  # None once it was reported or does not matter
        self.set_scale(scale)

    def set_scale(self, scale: float) -> None:
        """Notes that an iteration starts with a scale that was loaded or configured."""
        self._scale: float | Tensor = scale
        self.forget_peak(scale)

    def forget_peak(self, scale: float | None) -> None:
        """Forgets what went before a scale that the user chose; None if it is on the device."""
        self._highest = 0.0 if scale is None else scale
        self._num_overflows = 0  # in a row, as far as the host knows

    def begin_iteration(self) -> None:
        """Lets go of gradients that past reports could still read: they are about to change."""
        for report in self._last_reports:
            report.close()
        self._last_reports = ()

    def note_loss(self, output: Tensor) -> None:
        """Notes whether an output that is scaled is a float16 loss."""
        if self._is_loss_float16 is False and output.dtype is torch.float16:
            self._is_loss_float16 = output.requires_grad

    def find_low_loss(self) -> str | None:
        """Returns a warning, once, if the first steps overflowed because of a loss in float16."""
        if not self._is_loss_float16:
            return None
        if not (self._used > _FLOAT16_MAX or self._num_overflows >= _OVERFLOWS_OF_LOSS):
            return None
        self._is_loss_float16 = None
        return (
            "every step so far was skipped because gradients overflowed, and the loss itself is "
            f"float16, so that its gradient, the scale, is too: at {self._used:g} it overflows or "
            "comes near. Compute the loss in float32: inside the autocast region, or from outputs "
            "that are float32 (`.float()`, or output_dtype='original' for amp_fx.compile)."
        )

    def end_iteration(
        self, scale: Tensor, reports: tuple[StepReport, ...], was_skipped: bool | None
    ) -> None:
        """Remembers an update; keeps a copy of the scale where only the device knows it."""
        self._used = self._scale if isinstance(self._scale, float) else 0.0
        known = loss_scale.peek(scale)
        new_scale: float | Tensor = scale.clone() if known is None else known
        self._updates.append((self._scale, new_scale, reports))
        self._scale = new_scale
        self._last_reports = reports
        self._num_overflows = self._num_overflows + 1 if was_skipped else 0
        if was_skipped is not True:
            self._is_loss_float16 = None
        if known is not None and known > self._highest:
            self._highest = known

    def history(self) -> list[UpdateRecord]:
        """Lists the last updates, oldest first; may wait for the device."""
        return [
            UpdateRecord(
                scale=float(scale),
                new_scale=float(new_scale),
                skipped=any(report.skipped for report in reports),
                overflows=tuple(o for report in reports for o in report.overflows),
            )
            for scale, new_scale, reports in self._updates
        ]

    def find_collapse(
        self, scale: float | None, backoff_factor: float, floor: float, *, warns_once: bool
    ) -> str | None:
        """Returns a warning if the scale, as last seen, has collapsed or sticks at its floor."""
        if scale is None or (warns_once and self._has_warned):
            return None
        self._highest = max(self._highest, scale)
        lowest = self._highest * backoff_factor**_BACKOFFS_TO_COLLAPSE
        is_far_down = scale < 1.0 and scale <= lowest
        is_stuck = scale <= floor and self._num_overflows > _OVERFLOWS_TO_COLLAPSE
        if not (is_far_down or is_stuck):
            return None
        self._has_warned = True
        overflows = next((r.overflows for r in reversed(self._last_reports) if r.skipped), ())
        return (
            f"the gradient scale has collapsed to {scale:g}: gradients overflow however small it "
            f"gets, so the cause lies elsewhere. Overflowed last: {describe(overflows)}. Look for "
            "a loss that is not finite, or for values above 65504 in the forward pass."
        )


def any_skipped(reports: tuple[StepReport, ...]) -> bool | None:
    """Returns whether a step was skipped; None where only the device knows."""
    outcomes = [report.known_skipped for report in reports]
    if any(outcomes):
        return True
    return None if None in outcomes or not outcomes else False


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
