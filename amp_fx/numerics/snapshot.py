"""Snapshots: the parts of reports that tests compare."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.errors import AccuracyError
from amp_fx.numerics.records import UNIT, number
from amp_fx.numerics.report import AccuracyReport
from amp_fx.reports import Report, as_plain, new_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from amp_fx.numerics.records import OpRecord

SCHEMA = 1
"""The version of the format of a snapshot."""
FACTOR = 4.0
"""The largest accepted ratio of errors. Machines differ in how often a kernel rounds, once or a few
times per op. Four is two bits; another dtype changes an error by a factor of eight or more."""
LEAST_ELEMENTS = 8
"""Errors of results with fewer elements depend on chance."""

_MOVING = ("_to_copy", "clone", "copy_", "_unsafe_view", "unsafe_split", "contiguous")
"""Kernels that move or cast; their number depends on the version of torch."""

Change = tuple[str, str, str, str]
"""The module, the item, and its values before and now."""


def of(report: Any) -> dict[str, Any]:
    """Returns the snapshot of a report as JSON types."""
    if not isinstance(report, AccuracyReport):
        raise AccuracyError("a snapshot is of one dtype: call check once for each")
    known = {"loss": report.loss_magnitude or 0.0}
    chance = math.hypot(*(n.effect_rms for n in report.nodes))
    found = {
        "schema": SCHEMA,
        "torch": torch.__version__,
        "options": {
            "model": report.model,
            "dtype": report.dtype,
            "device_type": report.device_type,
            "reference": report.reference,
            "scale": report.scale,
        },
        "loss_error": _ratio(report.error, known["loss"]),
        "loss_error_by_chance": _ratio(chance, known["loss"]),
        "output_error": report.output_error,
        "gradient_error": report.gradient_error,
        "reference_problem": _problem(report),
        "suspects": sorted({f"{s.module}: {s.op} ({s.stage}, {s.kind})" for s in report.suspects}),
        "parameters": {g.name: list(g.shape) for g in report.gradients},
        "modules": _modules(report.nodes),
    }
    plain: dict[str, Any] = as_plain(found)
    return plain


def _problem(report: AccuracyReport) -> str | None:
    """Describes where the reference becomes infinite or NaN; older snapshots lack this entry."""
    at = report.reference_problem
    return (
        None if at is None else f"infinite or NaN, first {at.label} in {at.module or report.model}"
    )


def _ratio(value: float | None, whole: float) -> float | None:
    if value is None or not whole:
        return value
    return abs(value) / abs(whole)


def _modules(nodes: tuple[OpRecord, ...]) -> dict[str, Any]:
    """Returns the largest error of the forward, and the dtypes of each op, by module."""
    found: dict[str, Any] = {}
    for node in nodes:
        kernel = node.kernel.removeprefix("aten::")
        if node.stage != "forward" or kernel in _MOVING:
            continue
        module = found.setdefault(node.module, {"error": 0.0, "ops": {}})
        if node.numel >= LEAST_ELEMENTS and node.is_float:
            module["error"] = max(module["error"], node.accumulated)
        dtypes = module["ops"].setdefault(node.op or node.kernel, {})
        dtypes[node.dtype] = dtypes.get(node.dtype, 0) + 1
    return found


def changes(old: dict[str, Any], new: dict[str, Any], factor: float) -> list[Change]:
    """Returns the differences as rows.

    Another version of torch runs other kernels, so their number, and ops without a name in a
    policy, are not compared then.

    Args:
        old: The committed snapshot.
        new: The snapshot of this run.
        factor: The largest accepted ratio of errors.
    """
    if old.get("schema") != new["schema"]:
        return [("", "schema", str(old.get("schema")), str(new["schema"]))]
    rows = [
        ("", name, str(old["options"][name]), str(value))
        for name, value in new["options"].items()
        if old["options"][name] != value
    ]
    before, after = (str(s.get("reference_problem") or "-") for s in (old, new))
    if before != after:
        rows.append(("", f"reference ({new['options']['reference']})", before, after))
    rows += [("", "suspect", s, "-") for s in old["suspects"] if s not in new["suspects"]]
    rows += [("", "suspect", "-", s) for s in new["suspects"] if s not in old["suspects"]]
    for name in {**old["parameters"], **new["parameters"]}:
        shapes = [s["parameters"].get(name, "-") for s in (old, new)]
        if shapes[0] != shapes[1]:
            rows.append((name, "shape", str(shapes[0]), str(shapes[1])))
    is_same_torch = _version(old) == _version(new)
    for name in {**old["modules"], **new["modules"]}:
        first, then = (s["modules"].get(name, {"ops": {}})["ops"] for s in (old, new))
        rows += _op_changes(name, first, then, is_same_torch=is_same_torch)
    return rows + list(_error_changes(old, new, factor))


def _version(snapshot: dict[str, Any]) -> list[str]:
    return str(snapshot["torch"]).split(".")[:2]


def _op_changes(
    module: str, old: dict[str, Any], new: dict[str, Any], *, is_same_torch: bool
) -> Iterator[Change]:
    for op in {**old, **new}:
        before, after = old.get(op, {}), new.get(op, {})
        is_same = before == after if is_same_torch else "::" in op or {*before} == {*after}
        if not is_same:
            yield module or "(outermost)", op, _dtypes(before), _dtypes(after)


def _dtypes(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {dtype}" for dtype, count in sorted(counts.items())) or "-"


def _error_changes(old: dict[str, Any], new: dict[str, Any], factor: float) -> Iterator[Change]:
    """Yields errors that differ. That of the loss may be small by chance, so its spread counts."""
    unit = UNIT.get(new["options"]["dtype"], 0.0) / 4
    spread = max(_float(old["loss_error_by_chance"]), unit)
    if old["loss_error"] is None or new["loss_error"] is None:
        pairs = [("", "output_error", old["output_error"], new["output_error"], unit)]
    else:
        pairs = [("", "loss_error", old["loss_error"], new["loss_error"], spread)]
    pairs.append(("", "gradient_error", old["gradient_error"], new["gradient_error"], unit))
    pairs += [
        (name, "error", old["modules"][name]["error"], new["modules"][name]["error"], unit)
        for name in new["modules"]
        if name in old["modules"]
    ]
    for place, what, before, after, floor in pairs:
        first, second = _float(before), _float(after)
        if math.isfinite(first) and math.isfinite(second):
            first, second = max(first, floor), max(second, floor)
            is_same = first <= factor * second and second <= factor * first
        else:
            is_same = str(first) == str(second)
        if not is_same:
            yield place, what, number(_float(before)), number(_float(after))


def _float(value: Any) -> float:
    return 0.0 if value is None else float(value)


def table(rows: Iterable[Change], before: str = "snapshot", after: str = "now") -> Table:
    """Returns the changes as a table."""
    names = ("where", "what", before, after)
    found = new_table(*names, folded=names)
    for row in rows:
        found.add_row(*row)
    return found


@dataclasses.dataclass(frozen=True)
class ReportDiff(Report):
    """The differences between two reports.

    Attributes:
        before: The first report.
        after: The second report.
    """

    computed, omitted = ("rows",), ("before", "after")

    before: AccuracyReport
    after: AccuracyReport

    @property
    def rows(self) -> list[Change]:
        """Module, item, and values before and after: suspects, dtypes of ops, errors."""
        return changes(of(self.before), of(self.after), FACTOR)

    def _render(self) -> RenderableType:
        return table(self.rows, "before", "after")


def where_made(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Names the versions of torch of both snapshots."""
    if old.get("torch") == new["torch"]:
        return f"Both are of torch {new['torch']}."
    return f"The snapshot is of torch {old.get('torch')}, this run of {new['torch']}."
