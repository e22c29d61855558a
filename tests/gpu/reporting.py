"""The report of ``make gpu``: as JSON, and as Markdown to read and to paste."""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import TYPE_CHECKING, Any

from tests.traffic import timed
from tests.traffic.command import Row, markdown
from tests.traffic.facts import three_digits
from tests.traffic.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.gpu.runner import Outcome


def write(path: Path, facts: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Writes both files; called again after each part."""
    data = {**facts, "parts": [dataclasses.asdict(outcome) for outcome in outcomes]}
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(as_markdown(facts, outcomes)) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def as_markdown(facts: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The report, line by line."""
    yield "# amp_fx on this machine"
    yield ""
    yield from (f"- {name}: {value}" for name, value in facts.items())
    yield ""
    yield "| part | result | | seconds | |"
    yield "|---|---|---|---:|---|"
    for outcome in outcomes:
        cells = (outcome.name, outcome.status, outcome.detail, f"{outcome.seconds:.0f}")
        yield f"| {' | '.join(cells)} | {outcome.about} |"
    for outcome in outcomes:
        yield from _failures(outcome)
    for outcome in outcomes:
        yield from _figures(outcome)


def _failures(outcome: Outcome) -> Iterator[str]:
    if not outcome.failures and not outcome.tail:
        return
    yield ""
    yield f"## {outcome.name}: {outcome.status}"
    yield ""
    yield from (f"- {failure}" for failure in outcome.failures)
    if outcome.tail:
        yield from ("", "```text", *outcome.tail, "```")


def _figures(outcome: Outcome) -> Iterator[str]:
    figures = outcome.figures or {}
    if "comparisons" in figures:
        yield from _comparisons(outcome.name, figures)
    elif "rows" in figures:
        yield from ("", f"## {outcome.name}", "", markdown([_row(row) for row in figures["rows"]]))
    elif "timings" in figures:
        yield from ("", f"## {outcome.name}", "")
        yield from (f"- {timed.line_of(row)}" for row in figures["timings"])
    elif figures:
        yield from ("", f"## {outcome.name}", "")
        yield from (f"- {name}: {value}" for name, value in figures.items())


def _row(data: Mapping[str, Any]) -> Row:
    totals = {name: Totals(**total) for name, total in data["totals"].items()}
    return Row(**{**data, "totals": totals})


def _comparisons(name: str, figures: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"## {name}", "")
    yield "| workload | contender | median | time / native's | error |"
    yield "|---|---|---:|---:|---:|"
    for comparison in figures["comparisons"]:
        medians = {name: statistics.median(s) for name, s in comparison["seconds"].items()}
        for contender, median in medians.items():
            error = comparison["errors"].get(contender)
            cells = (
                f"`{comparison['case']}`: {comparison['workload']}",
                contender,
                f"{three_digits(1e3 * median)} ms",
                f"{median / medians['native']:.2f}" if "native" in medians else "-",
                "-" if error is None else f"{error:.1e}",
            )
            yield f"| {' | '.join(cells)} |"
    for comparison in figures["comparisons"]:
        for where, why in comparison["failures"].items():
            yield f"- {where} failed: {why}"
