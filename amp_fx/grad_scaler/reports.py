"""Reports on steps: which ones were skipped, and because of which parameters."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amp_fx.errors import ScalerTypeError
from amp_fx.grad_scaler.gradients import dense
from amp_fx.weights.spread import part_of

if TYPE_CHECKING:
    from collections.abc import Callable

NamedParameters: TypeAlias = Iterable[tuple[str, Tensor]]

_MOST_CHARACTERS = 400


class ParameterNames:
    """Names of parameters, which it refers to weakly."""

    def __init__(self) -> None:
        self._names = WeakTensorKeyDictionary()

    def add(self, named_parameters: NamedParameters) -> None:
        """Adds pairs of name and parameter; adds nothing if one of them is something else."""
        pairs = list(named_parameters)
        for pair in pairs:
            match pair:
                case (str(), Tensor()):
                    continue
            raise ScalerTypeError(
                "named_parameters must give pairs of name and parameter, as "
                f"model.named_parameters() does; got {type(pair).__name__!r}."
            )
        self._names.update((param, name) for name, param in pairs)

    def of(self, optimizer: Any) -> list[tuple[str, Tensor]]:
        """Lists an optimizer's parameters with these names, its own, or their positions."""
        named = []
        for i, group in enumerate(optimizer.param_groups):
            own = group.get("param_names")
            for j, param in enumerate(group["params"]):
                name = own[j] if own else f"param_groups[{i}]['params'][{j}]"
                known = self._names.get(param, None)  # type: ignore[no-untyped-call]
                named.append((known or name, param))
        return named


def listing(names: list[str]) -> str:
    """Joins names; of many only the first are shown."""
    return textwrap.shorten(", ".join(names), _MOST_CHARACTERS, placeholder=" and more")


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
        """Returns `layer.weight (3 inf, 1 nan of 64)`."""
        return f"{self.name} ({self.num_inf} inf, {self.num_nan} nan of {self.numel})"


class StepReport:
    """Outcome of one step.

    Reading ``skipped`` or ``overflows`` waits for the device if the step itself did not. The
    gradients of a skipped step are read then. If they are cleared before, or if ``scale`` has
    started the next iteration, ``overflows`` is empty.
    """

    def __init__(
        self, flags: Iterable[Tensor] = (), count: Callable[[], tuple[Overflow, ...]] = tuple
    ) -> None:
        self._flags = [*flags]
        self._count = count
        self._skipped: bool | None = None
        self._overflows: tuple[Overflow, ...] = ()
        if all(flag.is_cpu for flag in self._flags):
            self._look()

    @property
    def skipped(self) -> bool:
        """True if the optimizer was kept from stepping."""
        return self._look()

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """The parameters whose gradients were not finite; empty if the step was not skipped."""
        self._look()
        return self._overflows

    def close(self) -> None:
        """Forgets how to count overflows: the gradients are about to change."""
        self._count = tuple

    def _look(self) -> bool:
        if self._skipped is None:
            self._skipped = any(flag.item() for flag in self._flags)
            self._overflows = self._count() if self._skipped else ()
            self._flags = []
            self.close()
        return self._skipped

    def __repr__(self) -> str:
        """Returns the known facts without looking anything up."""
        skipped = "<on the device>" if self._skipped is None else self._skipped
        return f"StepReport(skipped={skipped}, overflows=[{listing([*map(str, self._overflows)])}])"


@torch.no_grad()
def count_overflows(
    named_params: list[tuple[str, Tensor]], factor: Tensor | None = None
) -> tuple[Overflow, ...]:
    """Counts elements of gradients, multiplied by a factor, that are not finite.

    Waits for the device only once all counts are queued.
    """
    counts = []
    for name, param in named_params:
        if param.grad is not None:
            values = part_of(dense(param.grad))
            values = values if factor is None else values * factor.to(values.device)
            counted = torch.stack([values.isinf().sum(), values.isnan().sum()])
            counts.append((name, counted, values.numel()))
    read = [(name, *counted.tolist(), numel) for name, counted, numel in counts]
    return tuple(Overflow(*each) for each in read if each[1] or each[2])
