"""Report of ``amp_fx.store_low``: a record for each weight, and a table."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from amp_fx.explanation.table import folded_path, without_numbers
from amp_fx.reports import Report, dtype_cell, human, new_table, stacked, times

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """Record of one parameter or buffer in ``store_low``.

    Attributes:
        path: Path in the model; the first one if there are several.
        shape: The sizes.
        dtype_before: The dtype before.
        dtype: The dtype after.
        bytes_before: Memory of the elements before.
        bytes: Memory of the elements after.
        reason: The reason why the weight was not converted, or ``""``.
    """

    path: str
    shape: tuple[int, ...]
    dtype_before: str
    dtype: str
    bytes_before: int
    bytes: int
    reason: str


@dataclasses.dataclass(frozen=True, repr=False)
class StorageReport(Report):
    """Report of ``amp_fx.store_low``. Prints as a table, also in notebooks.

    Attributes:
        model: Class of the model.
        policy: Name of the policy.
        dtype: The dtype of the stored weights.
        device_type: The device type of the region.
        weights: All parameters and buffers, without duplicates.
    """

    computed = ("bytes_before", "bytes")

    model: str
    policy: str
    dtype: str
    device_type: str
    weights: tuple[StoredWeight, ...]

    @property
    def stored(self) -> tuple[StoredWeight, ...]:
        """The weights that were stored low."""
        return tuple(weight for weight in self.weights if not weight.reason)

    @property
    def bytes_before(self) -> int:
        """Bytes of all weights before."""
        return sum(weight.bytes_before for weight in self.weights)

    @property
    def bytes(self) -> int:
        """Bytes of all weights now."""
        return sum(weight.bytes for weight in self.weights)

    def _render(self) -> RenderableType:
        from rich.text import Text

        head = Text.assemble((self.model, "bold"), f" for {self.device_type} {self.dtype}")
        head.append(f", policy {self.policy!r}")
        share = self.bytes / self.bytes_before if self.bytes_before else 1.0
        sums = (
            f"stored low: {len(self.stored)} of {len(self.weights)} weights;"
            f" {human(self.bytes_before)} before, {human(self.bytes)} now ({share:.1%})"
        )
        return stacked(head, sums, "", _table(self))


def _table(report: StorageReport) -> Table:
    """Returns one row for all weights that differ only in the numbers of their layers."""
    names = ("weight", "x", "was", "is", "bytes", "why it stays")
    groups: dict[Any, list[StoredWeight]] = {}
    for weight in report.weights:
        key = (without_numbers(weight.path), weight.dtype_before, weight.dtype, weight.reason)
        groups.setdefault(key, []).append(weight)
    rows = [
        (
            folded_path(weight.path for weight in weights),
            times(len(weights)),
            dtype_cell(before),
            dtype_cell(now),
            human(sum(weight.bytes for weight in weights)),
            reason,
        )
        for (_, before, now, reason), weights in groups.items()
    ]
    return new_table(*names, rows=rows, folded=("weight", "why it stays"), right=("x", "bytes"))
