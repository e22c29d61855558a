"""The report of ``amp_fx.audit``: tables of uses by dtype, and findings with their repairs."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from amp_fx.explanation.table import folded_path, without_numbers
from amp_fx.graphs.locations import short_path
from amp_fx.numerics.records import grouped
from amp_fx.reports import Report, dtype_cell, first_of, human, new_table, stacked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType
    from rich.text import Text

    from amp_fx.graphs.locations import NodeLocation

REPAIRS = {
    "update_lost": "Store the weights in float32 and train under torch.autocast, or give the "
    "optimizer float32 copies of them.",
    "state_low": "Store the state in float32: use an optimizer, or an option of it, that does so, "
    "and do not cast the state.",
    "gradient_sum_low": "Add gradients in float32: store the weights in float32, and use "
    "torch.autocast(..., cache_enabled=False) if one weight is used several times in a region.",
    "reduction_low": "Add in float32: reduce_dtype=torch.float32 in FSDP2's "
    "MixedPrecisionPolicy, no compressing hook in DDP, float32 partial sums in tensor parallel.",
    "loss_low": "Call .float() on the values before they are rounded, or call a loss function of "
    "torch.nn.functional inside of the autocast region.",
    "router_low": "Compute the values that decide in float32: call .float() on the inputs inside "
    "torch.autocast(..., enabled=False).",
    "integer_low": "Compute the product in float32 inside torch.autocast(..., enabled=False).",
    "float32_product": "Call an op that autocast casts, such as torch.matmul without out=, or cast "
    "the inputs to the dtype of the region; turn autocast off only around ops that need float32.",
    "backward_in_region": "Call backward() after the autocast region.",
    "scaler_with_bfloat16": "Remove the scaler, or use GradScaler(enabled=False).",
    "scaler_missing": "Use amp_fx.GradScaler or torch.amp.GradScaler, or train in bfloat16.",
    "weights_low": "Call model.float() before you create the optimizer: autocast casts the "
    "weights in each step.",
    "region_without_effect": "Give the region the device type of the tensors and a low dtype, "
    "and the model float32 weights.",
    "upcast_lost": "Compute in float32 inside torch.autocast(..., enabled=False), or omit the cast "
    "to float32.",
}
"""The repair of each kind of finding; the keys are the kinds, in the order of a report."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A loss of precision, or a part of mixed precision that has no effect.

    Attributes:
        kind: The kind of the finding, a key of ``REPAIRS``.
        module: The path of the innermost module; empty outside of modules.
        source: The file and the line, as in ``"/home/me/model.py:12"``; empty if unknown.
        code: The text of that line.
        message: The cost, in one sentence.
        repair: The change that avoids the cost.
        count: The number of repeated modules with this finding.
    """

    kind: str
    module: str
    source: str
    code: str
    message: str
    repair: str
    count: int = 1

    def __str__(self) -> str:
        """Returns the place, the cost and the repair, in three lines."""
        file, _, line = self.source.rpartition(":")
        where = [self.module, f"{short_path(file)}:{line}" if file else "", self.code]
        times = f" (x {self.count})" if self.count > 1 else ""
        place = ", ".join(filter(None, where)) or "the whole step"
        return f"{self.kind}: {place}{times}\n   {self.message}\n   Repair: {self.repair}"


def new_finding(
    kind: str, site: NodeLocation, message: str, module: str | None = None, repair: str = ""
) -> Finding:
    """Returns a finding at a site; its repair is that of the kind by default."""
    source = f"{site.file}:{site.line}" if site.file else ""
    where = site.module if module is None else module
    return Finding(kind, where, source, site.code, message, repair or REPAIRS[kind])


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merges findings of one line in equal modules, and sorts them by kind."""
    groups = grouped(
        findings,
        lambda each: (each.kind, each.source or each.message, without_numbers(each.module)),
    )
    several = [_merge(group) for group in groups.values()]
    order = list(REPAIRS)
    return tuple(sorted(several, key=lambda finding: order.index(finding.kind)))


def _merge(group: list[Finding]) -> Finding:
    modules = dict.fromkeys(finding.module for finding in group)
    return dataclasses.replace(group[0], module=folded_path(modules), count=len(modules))


@dataclasses.dataclass(frozen=True)
class Use:
    """Tensors or ops of one kind and one dtype in one module.

    Attributes:
        what: ``"parameters"``, ``"buffers"``, ``"gradients"``, ``"optimizer states"``,
            ``"saved activations"``, ``"products"``, ``"reductions"`` or ``"collectives"``.
        dtype: Their dtype; of ops, that of the first floating-point input.
        module: The path of the module.
        count: Their number.
        num_bytes: The size of the tensors; of ops, of inputs and results.
        flops: The floating-point operations of products.
    """

    what: str
    dtype: str
    module: str
    count: int
    num_bytes: int
    flops: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class AuditReport(Report):
    """Shows the precision of one training step, and losses of precision.

    Attributes:
        model: The class of the step, or the name of the function.
        loss: The value of the loss; None if the step returns none.
        findings: Losses of precision, sorted by kind.
        uses: Tensors and ops by kind, dtype and module.
    """

    model: str
    loss: float | None
    findings: tuple[Finding, ...]
    uses: tuple[Use, ...]

    def to_markdown(self) -> str:
        """Returns the report as Markdown, for a pull request or a job summary."""
        lines = [f"**{_escaped(self.model)}**{self._outcome()}", ""]
        for each in self.findings:
            place, message, repair = (_escaped(line.strip()) for line in str(each).split("\n"))
            lines.append(f"- **{place}**. {message} {repair}")
        cells = [tuple(map(_escaped, row)) for row in self._rows()]
        rows = [_COLUMNS, ("---",) * len(_COLUMNS), *cells]
        lines += [*([""] if self.findings else []), *(f"| {' | '.join(row)} |" for row in rows)]
        return "\n".join(lines) + "\n"

    def _outcome(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.6g}"
        number = len(self.findings)
        return f": {number} finding{'' if number == 1 else 's'}{loss}"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yields the rows of the table, one for each kind and dtype."""
        groups = grouped(self.uses, lambda use: (use.what, use.dtype))
        for (what, dtype), uses in groups.items():
            flops = sum(use.flops for use in uses)
            yield (
                what,
                dtype,
                str(sum(use.count for use in uses)),
                human(sum(use.num_bytes for use in uses)),
                human(flops, "") if flops else "",
                _modules(uses),
            )

    def _render(self) -> RenderableType:
        from rich.text import Text

        head = Text.assemble((self.model, "bold"), self._outcome())
        findings = [f"{place}. {each}" for place, each in enumerate(self.findings, 1)]
        rows: list[tuple[str | Text, ...]] = [
            (what, dtype_cell(dtype), *cells) for what, dtype, *cells in self._rows()
        ]
        right = ("x", "bytes", "flops")
        table = new_table(*_COLUMNS, rows=rows, folded=("modules",), right=right)
        return stacked(head, *findings, "", table)


_COLUMNS = ("what", "dtype", "x", "bytes", "flops", "modules")


def _escaped(text: str) -> str:
    """Escapes the characters of names and code that Markdown or HTML would interpret."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text)


_MOST = 3


def _modules(uses: list[Use]) -> str:
    """Names the modules with the most bytes."""
    sizes: dict[str, int] = {}
    for use in uses:
        sizes[use.module or "-"] = sizes.get(use.module or "-", 0) + use.num_bytes
    names = sorted(sizes, key=lambda name: -sizes[name])
    return ", ".join(first_of(names, _MOST))
