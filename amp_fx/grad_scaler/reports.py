"""Which steps were skipped, and because of which parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from amp_fx.grad_scaler import host_scale
from amp_fx.grad_scaler.agreement import local

if TYPE_CHECKING:
    from collections.abc import Callable

_NUM_OVERFLOWS_SHOWN = 5


@dataclass(frozen=True)
class Overflow:
    """A parameter whose gradient was not finite.

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
        """`layer.weight (3 inf, 1 nan of 64)`."""
        return f"{self.name} ({self.num_inf} inf, {self.num_nan} nan of {self.numel})"


@dataclass(frozen=True)
class UpdateRecord:
    """One iteration, from the first `scale` to `update`.

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
    """What became of one step. Nothing is looked up before it is asked for.

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
        """Report on a check of gradients; without one, on a step that nothing could skip.

        Args:
            found_inf: 0-dim; not 0 if something was not finite.
            count: looks at the gradients.
        """
        self._found_inf = found_inf
        self._count = count
        self._overflows: tuple[Overflow, ...] | None = None
        self.known_skipped: bool | None = False
        if found_inf is not None:
            value = host_scale.peek(found_inf)
            self.known_skipped = None if value is None else value != 0.0
        if self.known_skipped:
            self._look()

    @property
    def skipped(self) -> bool:
        """Whether the optimizer was kept from stepping; may wait for the device."""
        if self.known_skipped is None:
            assert self._found_inf is not None
            self.known_skipped = host_scale.wait_for(self._found_inf) != 0.0
        return self.known_skipped

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """The parameters whose gradients were not finite; may wait for the device.

        Empty after a skipped step if the gradients were gone when this was first asked for.
        """
        if self.skipped:
            self._look()
        return self._overflows or ()

    def learn_skipped(self) -> bool:
        """`skipped`, and which parameters overflowed if so; may wait for the device."""
        if self.skipped:
            self._look()
        return self.skipped

    def close(self) -> None:
        """The gradients are no longer those of this step."""
        self._count = None

    def _look(self) -> None:
        if self._overflows is None and self._count is not None:
            self._overflows = self._count()
        self._count = None

    def __repr__(self) -> str:
        """What is known, without looking anything up."""
        if self.known_skipped is None:
            return "StepReport(skipped=<on the device>)"
        if not self.known_skipped:
            return "StepReport(skipped=False)"
        return f"StepReport(skipped=True, overflows=[{describe(self._overflows or ())}])"


class PendingRecord(NamedTuple):
    """An `UpdateRecord` whose values may still be on the device."""

    scale: float | Tensor
    new_scale: float | Tensor
    reports: tuple[StepReport, ...]

    def resolve(self) -> UpdateRecord:
        """Get the values; may wait for the device."""
        return UpdateRecord(
            scale=float(self.scale),
            new_scale=float(self.new_scale),
            skipped=any(report.skipped for report in self.reports),
            overflows=tuple(o for report in self.reports for o in report.overflows),
        )


def describe(overflows: tuple[Overflow, ...]) -> str:
    """A line that names the first few parameters."""
    if not overflows:
        return "parameters not known"
    shown = ", ".join(str(overflow) for overflow in overflows[:_NUM_OVERFLOWS_SHOWN])
    more = len(overflows) - _NUM_OVERFLOWS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


@torch.no_grad()
def count_overflows(
    named_params: list[tuple[str, Tensor]], factor: Tensor | None = None
) -> tuple[Overflow, ...]:
    """Count what is not finite in the gradients of parameters; waits for the device.

    Two waits per device: one to find the gradients, one to count in those that were found.

    Args:
        named_params: pairs of name and parameter.
        factor: float32, 0-dim. If given, counts in the gradients times this.
    """
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, param in named_params:
        if param.grad is not None and (values := _values(param.grad)).numel():
            if factor is not None:
                values = values * factor.to(values.device)
            by_device.setdefault(values.device, []).append((name, values))
    return tuple(o for named_grads in by_device.values() for o in _count(named_grads))


def _count(named_grads: list[tuple[str, Tensor]]) -> list[Overflow]:
    finite = [torch.linalg.vector_norm(grad, math.inf).isfinite() for _, grad in named_grads]
    bad = [
        named_grad
        for named_grad, is_finite in zip(named_grads, torch.stack(finite).tolist(), strict=True)
        if not is_finite
    ]
    if not bad:
        return []
    counts = torch.stack([torch.stack([g.isinf().sum(), g.isnan().sum()]) for _, g in bad]).tolist()
    return [
        Overflow(name, num_inf, num_nan, grad.numel())
        for (name, grad), (num_inf, num_nan) in zip(bad, counts, strict=True)
    ]


def _values(grad: Tensor) -> Tensor:
    if grad.layout is torch.strided:
        return local(grad)
    return grad.coalesce()._values() if grad.layout is torch.sparse_coo else grad.values()
