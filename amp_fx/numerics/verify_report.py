"""The report of ``amp_fx.verify``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from amp_fx.reports import Report, first_of, stacked

if TYPE_CHECKING:
    from rich.console import RenderableType

    from amp_fx.numerics.equality import Difference
    from amp_fx.numerics.trace_diff import OpDifference

_MOST = 12


@dataclasses.dataclass(frozen=True, repr=False)
class VerifyReport(Report):
    """The result of comparing a compiled program with eager autocast, bit for bit.

    Attributes:
        model: The class of the model, or the name of the function.
        dtype: The low dtype.
        device_type: The device type.
        num_compared: The number of compared tensors.
        differences: The tensors that differ, in the order in which the program computes them.
        first: The first op whose result differs; None if it is unknown.
        cause: The cause; empty without a difference.
        remedy: Options of the backend with which all bits are equal; empty if none are known.
        num_graphs: The number of graphs that amp_fx compiled; 0 means that nothing was verified.
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

    @property
    def is_equal(self) -> bool:
        """True if a program was compiled and every bit is equal."""
        return not self.differences and self.num_graphs > 0

    def _render(self) -> RenderableType:
        head = f"{self.model} on {self.device_type} in {self.dtype}: "
        if not self.differences and not self.num_graphs:
            return stacked(f"{head}nothing was compiled, so nothing is verified")
        if self.is_equal:
            return stacked(f"{head}all {self.num_compared} tensors are equal to eager autocast's")
        count = len(self.differences)
        lines = [f"{head}{count} of {self.num_compared} tensors differ from eager autocast's"]
        lines += [f"  {each}" for each in first_of([*map(str, self.differences)], _MOST)]
        lines += [f"first: {self.first}"] if self.first else []
        lines += [f"cause: {self.cause}"] if self.cause else []
        lines += [f"equal with options={self.remedy}"] if self.remedy else []
        return stacked(*lines)
