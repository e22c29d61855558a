"""Reports on steps: whether they were skipped, and the parameters that caused it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amp_fx.errors import ArgumentTypeError
from amp_fx.grad_scaler.gradients import dense
from amp_fx.reports import first_of
from amp_fx.weights.spread import part_of

if TYPE_CHECKING:
    from collections.abc import Callable

NamedParameters: TypeAlias = Iterable[tuple[str, Tensor]]


class ParameterNames:
    """Names of parameters. Refers to the parameters weakly."""

    def __init__(self) -> None:
        self._names = WeakTensorKeyDictionary()

    def add(self, named_parameters: NamedParameters) -> None:
        """Adds pairs of name and parameter; adds nothing if an item is invalid."""
        pairs = list(named_parameters)
        for pair in pairs:
            match pair:
                case (str(), Tensor()):
                    continue
            raise ArgumentTypeError(
                "named_parameters must give pairs of name and parameter, as "
                f"model.named_parameters() does; got {type(pair).__name__!r}."
            )
        self._names.update((param, name) for name, param in pairs)

    def of(self, optimizer: Any) -> list[tuple[str, Tensor]]:
        """Lists an optimizer's parameters with their names.

        Uses the added names, else the names of the optimizer, else positions.
        """
        named = []
        for i, group in enumerate(optimizer.param_groups):
            group_names = group.get("param_names")
            for j, param in enumerate(group["params"]):
                default = group_names[j] if group_names else f"param_groups[{i}]['params'][{j}]"
                name = self._names.get(param, None)  # type: ignore[no-untyped-call]
                named.append((name or default, param))
        return named


@dataclass(frozen=True)
class Overflow:
    """A parameter whose gradient was not finite.

    Attributes:
        name: The parameter's name.
        num_inf: Number of infinite elements of its gradient.
        num_nan: Number of elements that are not a number.
        numel: Number of elements of the gradient.
    """

    name: str
    num_inf: int
    num_nan: int
    numel: int

    def __str__(self) -> str:
        """Returns text such as `layer.weight (3 inf, 1 nan of 64)`."""
        return f"{self.name} ({self.num_inf} inf, {self.num_nan} nan of {self.numel})"


class StepReport:
    """Outcome of one step.

    Reading ``skipped`` or ``overflows`` waits for the device if the step did not, and reads the
    gradients of a skipped step. ``overflows`` is empty if the gradients were cleared before, or if
    ``scale`` has started the next iteration.
    """

    def __init__(
        self, flags: Iterable[Tensor] = (), count: Callable[[], tuple[Overflow, ...]] = tuple
    ) -> None:
        self._flags = [*flags]
        self._count = count
        self._skipped: bool | None = None
        self._overflows: tuple[Overflow, ...] = ()
        if all(flag.is_cpu for flag in self._flags):
            self._read_flags()

    @property
    def skipped(self) -> bool:
        """True if the optimizer's step was skipped."""
        return self._read_flags()

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """The parameters whose gradients were not finite; empty if the step was not skipped."""
        self._read_flags()
        return self._overflows

    def close(self) -> None:
        """Disables counting of overflows, because the gradients are about to change."""
        self._count = tuple

    def _read_flags(self) -> bool:
        if self._skipped is None:
            self._skipped = any(flag.item() for flag in self._flags)
            self._overflows = self._count() if self._skipped else ()
            self._flags = []
            self.close()
        return self._skipped

    def __repr__(self) -> str:
        """Returns the outcome as far as known without waiting for the device."""
        skipped = "<on the device>" if self._skipped is None else self._skipped
        overflows = ", ".join(first_of([*map(str, self._overflows)], 8))
        return f"StepReport(skipped={skipped}, overflows=[{overflows}])"


@torch.no_grad()
def count_overflows(
    named_params: list[tuple[str, Tensor]], factor: Tensor | None = None
) -> tuple[Overflow, ...]:
    """Counts elements of gradients, multiplied by a factor, that are not finite.

    Queues all counts before it waits for the device.
    """
    counts = []
    for name, param in named_params:
        if param.grad is not None:
            values = part_of(dense(param.grad))
            values = values if factor is None else values * factor.to(values.device)
            counted = torch.stack([values.isinf().sum(), values.isnan().sum()])
            counts.append((name, counted, values.numel()))
    overflows = []
    for name, counted, numel in counts:
        num_inf, num_nan = counted.tolist()
        if num_inf or num_nan:
            overflows.append(Overflow(name, num_inf, num_nan, numel))
    return tuple(overflows)
