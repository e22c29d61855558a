"""The result of ``amp_fx.verify``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from amp_fx.reports import Report

if TYPE_CHECKING:
    from rich.console import RenderableType

    from amp_fx.numerics.equality import Difference
    from amp_fx.numerics.trace_diff import OpDifference

_MOST = 12


@dataclasses.dataclass(frozen=True, repr=False)
class VerifyReport(Report):
    """The result of a comparison of a compiled program with eager autocast, bit by bit.

    Attributes:
        model: The model's class, or the function's name.
        dtype: What low-precision ops run in.
        device_type: Where.
        num_compared: How many tensors were compared.
        differences: Those that differ, in the order in which the program makes them.
        first: The first op whose result differs; None if that is not known.
        cause: What it stems from; empty without a difference.
        remedy: Options of the backend with which bits are equal; empty if none are known.
        num_graphs: How many graphs amp_fx compiled; without any, nothing was verified.
        reference: What the tensors were compared with.
    """

    computed = ("is_equal",)

    model: str
    dtype: str
    device_type: str
    num_compared: int
    differences: tuple[Difference, ...]
    first: OpDifference | None = None
    cause: str = ""
    remedy: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_graphs: int = 1
    reference: str = "eager autocast's"

    @property
    def is_equal(self) -> bool:
        """True if every bit is, of a program that was compiled."""
        return not self.differences and self.num_graphs > 0

    def _render(self) -> RenderableType:
        head = f"{self.model} on {self.device_type} in {self.dtype}: "
        if not self.differences and not self.num_graphs:
            return Text(f"{head}nothing was compiled, so nothing is verified")
        if self.is_equal:
            return Text(f"{head}all {self.num_compared} tensors are equal to {self.reference}")
        count = len(self.differences)
        lines = [f"{head}{count} of {self.num_compared} tensors differ from {self.reference}"]
        lines += [f"  {each}" for each in self.differences[:_MOST]]
        lines += [f"  and {count - _MOST} more"] if count > _MOST else []
        lines += [f"first: {self.first}"] if self.first else []
        lines += [f"cause: {self.cause}"] if self.cause else []
        lines += [f"equal with options={self.remedy}"] if self.remedy else []
        return Group(*(Text(line) for line in lines))

    def __repr__(self) -> str:
        """One line."""
        return f"<VerifyReport of {self.model}: {len(self.differences)} differences>"
