"""The report of ``amp_fx.conformance``."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, ClassVar

from amp_fx.reports import Report, dtype_cell, new_table, stacked

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """Result of one comparison.

    Attributes:
        check: Name of the check.
        dtype: Name of the low dtype of the region.
        op: The op, or a few words on the program.
        expected: The result of a device that conforms.
        got: The result of this device.
        mend: The change to make if the two differ.
    """

    computed: ClassVar[tuple[str, ...]] = ("passed",)

    check: str
    dtype: str
    op: str
    expected: str
    got: str
    mend: str

    @property
    def passed(self) -> bool:
        """True if the device conforms."""
        return self.expected == self.got


@dataclasses.dataclass(frozen=True, repr=False)
class ConformanceReport(Report):
    """Results of all checks on one device.

    Attributes:
        device_type: The device type.
        torch: The version of torch.
        results: All comparisons, in the order of the checks.
    """

    computed: ClassVar[tuple[str, ...]] = ("passed",)

    device_type: str
    torch: str
    results: tuple[CheckResult, ...]

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """Results in which the device does not conform."""
        return tuple(result for result in self.results if not result.passed)

    @property
    def passed(self) -> bool:
        """True if the device conforms in all results."""
        return not self.failures

    def _render(self) -> RenderableType:
        counts = collections.Counter(result.check for result in self.results)
        failed = collections.Counter(result.check for result in self.failures)
        verdict = f"{len(self.failures)} failures" if self.failures else "conforms"
        head = f"{self.device_type} with torch {self.torch}: {verdict}"
        numbers = [(check, str(n), str(failed[check] or "")) for check, n in counts.items()]
        names = ("check", "comparisons", "failures")
        parts: list[RenderableType] = [head, new_table(*names, rows=numbers, right=names[1:])]
        if self.failures:
            columns = ("op", "dtype", "expected", "got", "how to mend it")
            rows = [
                (result.op, dtype_cell(result.dtype), result.expected, result.got, result.mend)
                for result in self.failures
            ]
            parts.append(new_table(*columns, rows=rows, folded=columns))
        return stacked(*parts)
