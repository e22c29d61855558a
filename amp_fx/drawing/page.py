"""A picture as one HTML file that needs nothing else: pan, zoom, search, reasons, table."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from amp_fx.drawing.dot import FONT
from amp_fx.drawing.draw import title_of
from amp_fx.drawing.folding import first_of_folded
from amp_fx.errors import OptionError
from amp_fx.explanation.table import bare_op
from amp_fx.graphs.places import short_path
from amp_fx.numerics.records import number
from amp_fx.numerics.report import MEASURES, MOST
from amp_fx.reports import human

if TYPE_CHECKING:
    from amp_fx.drawing.draw import Drawing
    from amp_fx.explanation.records import GraphRecord, NodeRecord
    from amp_fx.numerics.records import OpRecord
    from amp_fx.numerics.report import AccuracyReport

MOST_MODULES = 24
"""How many modules of a page can be opened: each adds pictures."""

MOST_OUTER = 10
"""How many boxes the picture of a whole model may have before its modules stay closed."""

MEASURED = "Arial"
"""The font whose words Graphviz in the browser knows the widths of."""

MOST_OPS = 250
"""How many boxes a picture of all ops may have to go into the page: larger ones take long."""


def page_of(drawing: Drawing) -> str:
    """The page.

    It holds the picture as it was asked for, its modules and its ops, after and before the
    rewrite; the user chooses. Where there are too many ops, only modules are shown.
    """
    views = _views(drawing)
    has_dot = shutil.which("dot") is not None
    templates = "\n".join(
        f'<template data-view="{html.escape("|".join(name))}">'
        f"{view.svg[view.svg.index('<svg') :] if has_dot else _to_lay_out(view.source)}</template>"
        for name, view in views.items()
    )
    data = {
        "boxes": {"|".join(name[:3]): _members(view) for name, view in views.items()},
        "opens": {"|".join(name[:3]): _opens(view) for name, view in views.items()},
        "first": next(iter(views)),
        "hasDot": has_dot,
        "paints": _paints(drawing),
        "column": "policy" if drawing.report is None else "measured",
        "before": _nodes(drawing, before=True),
        "after": _nodes(drawing, before=False),
        "casts": _casts(drawing),
    }
    folder = files("amp_fx.drawing")
    template = folder.joinpath("page.html").read_text(encoding="utf-8")
    viz = "" if has_dot else f"<script>{folder.joinpath('viz.js').read_text('utf-8')}</script>"
    told = drawing.explanation
    contents = {
        "@TITLE@": html.escape(f"{told.model} on {told.device_type} {told.dtype}"),
        "@SUMMARY@": _summary(drawing),
        "@NOTES@": _notes(drawing),
        "@COLUMNS@": _COLUMNS[drawing.report is not None],
        "@VIEWS@": templates,
        "@VIZ@": viz,
        "@DATA@": json.dumps(data).replace("<", "\\u003c"),
    }
    # All at once: a module may have the name of a mark.
    return re.sub("|".join(contents), lambda mark: contents[mark[0]], template)


def _paints(drawing: Drawing) -> list[str]:
    """Returns what boxes can be coloured by, the requested one first."""
    names = ("dtype",) if drawing.report is None else (*MEASURES, "dtype")
    return sorted(names, key=lambda name: name != drawing.view.color)


def _views(drawing: Drawing) -> dict[tuple[str, str, str, str], Drawing]:
    """Returns the pictures that the page switches between; the one that was asked for is first.

    Keys are the module that is open, before or after, the level, and what colours the boxes. Each
    module that a picture shows closed has a picture of its own.
    """
    found: dict[tuple[str, str, str, str], Drawing] = {}
    asked = drawing.view.level or _guess_level(drawing)
    start = drawing.view.focus or ""
    for level in (asked, "op" if asked == "module" else "module", "model"):
        _add(found, drawing, drawing.view.focus, level, None if level == asked else MOST_OPS)
    waiting = _opened_by(found)
    while waiting and len({name[0] for name in found}) <= MOST_MODULES:
        path = waiting.pop(0)
        if path != start and path not in {name[0] for name in found}:
            focused = drawing.with_view(
                dataclasses.replace(drawing.view, focus=path, level=None, before=False)
            )
            level = "model" if _guess_level(focused) == "module" else "op"
            _add(found, drawing, path, level, None)
            waiting = _opened_by(found)
    return found


def _add(
    found: dict[tuple[str, str, str, str], Drawing],
    drawing: Drawing,
    focus: str | None,
    level: str,
    most: int | None,
) -> None:
    """Adds the pictures of a module at a level, unless they have too many boxes."""
    for before in (False, True) if any(record.before for record in drawing.records) else (False,):
        view = dataclasses.replace(drawing.view, focus=focus, level=level, before=before)
        if level == "model":
            view = dataclasses.replace(view, level="module", most=MOST_OUTER)
        try:
            made = drawing.with_view(view)
        except OptionError:  # nothing of the module is there
            continue
        if most is not None and sum(len(graph) for graph in made.boxes.values()) > most:
            continue
        for paint in _paints(drawing):
            painted = dataclasses.replace(view, color=paint)
            side = "before" if before else "after"
            found[focus or "", side, level, paint] = (
                made if paint == view.color else made.with_view(painted)
            )


def _opened_by(found: dict[tuple[str, str, str, str], Drawing]) -> list[str]:
    """Returns the modules that pictures show closed and that have none yet, outer ones first."""
    has = {name[0] for name in found}
    paths = {path for made in found.values() for path in _opens(made).values()}
    return sorted(paths - has, key=lambda path: (path.count("."), path))


def _opens(drawing: Drawing) -> dict[str, str]:
    """Returns the module that each closed box opens, by the box's id."""
    return {
        f"box-g{index}.{number}": first_of_folded(f"{box.module}.{box.title}".lstrip("."))
        for index, graph in enumerate(drawing.boxes.values())
        for number, (_, box) in enumerate(graph.nodes(data="box"))
        if box.kind == "module" and sum(count for _, count in box.shares) > 1
    }


def _guess_level(drawing: Drawing) -> str:
    boxes = [box for graph in drawing.boxes.values() for _, box in graph.nodes(data="box")]
    return "module" if any(box.kind == "module" for box in boxes) else "op"


def _to_lay_out(source: str) -> str:
    return html.escape(source.replace(FONT, MEASURED))


def _members(drawing: Drawing) -> dict[str, list[str]]:
    """By the id of a box in the picture, the nodes that it stands for."""
    records = {title_of(record): record for record in drawing.records}
    return {
        f"box-g{index}.{number}": [_key(records[title], name) for name in box.members]
        for index, (title, graph) in enumerate(drawing.boxes.items())
        for number, (_, box) in enumerate(graph.nodes(data="box"))
    }


def _key(record: GraphRecord, name: str) -> str:
    return f"{record.index}{'b' if record.stage == 'backward' else ''}:{name}"


def _nodes(drawing: Drawing, *, before: bool) -> list[dict[str, Any]]:
    measured = {} if drawing.report is None else {n.name: _words(n) for n in drawing.report.nodes}
    return [
        _node(record, node, measured)
        for record in drawing.records
        for node in (record.before if before else record.nodes)
        if node.kind != "weight"
    ]


_LABELS = {"cast": "cast", "kept_cast": "kept cast"}
"""What casts are called in the table, whatever op makes them."""


def _node(record: GraphRecord, node: NodeRecord, measured: dict[str, str]) -> dict[str, Any]:
    return {
        "label": _LABELS.get(node.kind, bare_op(node.op)),
        "listed": node.kind != "output",
        "key": _key(record, node.name),
        "name": node.name,
        "kind": node.kind,
        "op": node.op,
        "module": node.module,
        "type": node.module_type,
        "source": f"{short_path(node.file)}:{node.line}" if node.file else "",
        "code": node.code,
        "dtype": node.dtype,
        "treatment": node.treatment,
        "text": measured.get(node.name) or node.treatment or node.kind.removeprefix("op"),
        "origin": node.origin,
        "reason": node.reason,
        "inputs": [_key(record, name) for name in node.inputs],
        "outputs": [f"{t.dtype} [{', '.join(map(str, t.shape))}]" for t in node.outputs],
        "flops": human(node.flops, "") if node.flops else "",
    }


def _words(node: OpRecord) -> str:
    parts = [f"error {number(node.accumulated)}"]
    parts += [f"effect {number(node.effect)}"] if node.effect else []
    parts += [f"{node.overflows + node.singular} overflow"] if node.is_overflow else []
    return ", ".join(parts)


def _casts(drawing: Drawing) -> dict[str, dict[str, str]]:
    return {
        _key(record, cast.name): {
            "text": f"{cast.from_dtype} to {cast.to_dtype} for {cast.wanted_by}"
            + (f" ({cast.weight})" if cast.weight else ""),
            "weight": cast.weight,
            "state": cast.state,
            "why": cast.removed_by,
            "bytes": human(cast.bytes_moved),
        }
        for record in drawing.records
        for cast in record.casts
    }


_COLUMNS = {
    False: "A row is an op of the graph. <b>runs in</b>: the dtype that it runs in. <b>policy</b>: "
    "the cast policy that decided; of a cast, what it is made for.",
    True: "A row is a kernel: an op such as linear may run several. <b>runs in</b>: the dtype of "
    "its result. <b>measured</b>: <i>error</i> is its relative error since the start, against the "
    "reference; <i>effect</i> is what its own error adds to the loss, to first order; "
    "<i>overflow</i> counts elements that become infinite or NaN in it.",
}
"""Meanings of the table's columns: of an explanation (False) and of a report (True)."""


def _notes(drawing: Drawing) -> str:
    """The suspects of a report."""
    if drawing.report is None:
        return ""
    lines = [f"{i}. {suspect}" for i, suspect in enumerate(drawing.report.suspects[:MOST], 1)]
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines or ["no suspects"])


def _summary_of_report(report: AccuracyReport) -> str:
    loss = f"loss <b>{report.loss:.6g}</b> ({report.reference} {report.reference_loss:.6g})"
    error = f"error of the outputs <b>{number(report.output_error)}</b>"
    ops = f"<b>{len(report.nodes)}</b> ops, forward and backward"
    suspects = f"<b>{len(report.suspects)}</b> suspects"
    return " &middot; ".join((ops, error if report.loss is None else loss, suspects))


def _summary(drawing: Drawing) -> str:
    if drawing.report is not None:
        return _summary_of_report(drawing.report)
    totals = drawing.explanation.totals
    share = ", ".join(f"{part:.0%} {html.escape(name)}" for name, part in totals.flop_share.items())
    parts = [
        f"<b>{totals.num_ops}</b> ops",
        f"<b>{totals.casts_left}</b> casts per call ({human(totals.bytes_cast)})",
        f"<b>{totals.casts_kept}</b> casts kept (save {human(totals.bytes_kept)} per call)",
        f"<b>{totals.casts_removed}</b> removed",
        f"FLOPs: {share or 'none counted'}",
    ]
    parts += [f"<b>{totals.num_breaks}</b> graph breaks"] if totals.num_breaks else []
    parts += [f"<b>{totals.num_islands}</b> islands"] if totals.num_islands else []
    return " &middot; ".join(parts)
