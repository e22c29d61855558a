"""Self-contained HTML pages of drawings, with pan, zoom, search, reasons and a table."""

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
"""Maximum number of modules that a page can open; each adds pictures."""

MOST_OUTER = 10
"""Maximum number of boxes in the picture of a whole model before its modules are opened."""

MEASURED = "Arial"
"""The only font whose text widths Graphviz knows in the browser."""

MOST_OPS = 250
"""Maximum number of boxes in an additional picture of all ops; layout of larger ones is slow."""


def page_of(drawing: Drawing) -> str:
    """Returns the HTML page of a drawing.

    The page contains the requested picture, and pictures of modules and ops, after and before the
    rewrite, among which the user switches. Pictures with too many ops are omitted.
    """
    views = _views(drawing)
    has_dot = shutil.which("dot") is not None
    templates = []
    for name, view in views.items():
        # Without dot, Graphviz in the browser lays the pictures out.
        content = (
            view.svg[view.svg.index("<svg") :]
            if has_dot
            else html.escape(view.source.replace(FONT, MEASURED))
        )
        key = html.escape("|".join(name))
        templates.append(f'<template data-view="{key}">{content}</template>')
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
    explanation = drawing.explanation
    title = f"{explanation.model} on {explanation.device_type} {explanation.dtype}"
    contents = {
        "@TITLE@": html.escape(title),
        "@SUMMARY@": _summary(drawing),
        "@NOTES@": _notes(drawing),
        "@COLUMNS@": _COLUMNS[drawing.report is not None],
        "@VIEWS@": "\n".join(templates),
        "@VIZ@": viz,
        "@DATA@": json.dumps(data).replace("<", "\\u003c"),
    }
    # Replaced in one pass, because the name of a module may look like a placeholder.
    return re.sub("|".join(contents), lambda mark: contents[mark[0]], template)


def _paints(drawing: Drawing) -> list[str]:
    """Returns the properties that can determine colors, the requested one first."""
    names = ("dtype",) if drawing.report is None else (*MEASURES, "dtype")
    return sorted(names, key=lambda name: name != drawing.view.color)


def _views(drawing: Drawing) -> dict[tuple[str, str, str, str], Drawing]:
    """Returns the pictures of the page, the requested one first.

    Keys contain the open module, before or after, the level, and the color property. Each module
    that a picture shows closed has a separate picture.
    """
    views: dict[tuple[str, str, str, str], Drawing] = {}
    requested = drawing.view.level or _guess_level(drawing)
    start = drawing.view.focus or ""
    for level in (requested, "op" if requested == "module" else "module", "model"):
        _add(views, drawing, drawing.view.focus, level, None if level == requested else MOST_OPS)
    pending = _closed_modules(views)
    while pending and len({name[0] for name in views}) <= MOST_MODULES:
        path = pending.pop(0)
        if path != start and path not in {name[0] for name in views}:
            focused = drawing.with_view(
                dataclasses.replace(drawing.view, focus=path, level=None, before=False)
            )
            level = "model" if _guess_level(focused) == "module" else "op"
            _add(views, drawing, path, level, None)
            pending = _closed_modules(views)
    return views


def _add(
    views: dict[tuple[str, str, str, str], Drawing],
    drawing: Drawing,
    focus: str | None,
    level: str,
    most: int | None,
) -> None:
    """Adds the pictures of a module at a level, unless they have more than ``most`` boxes."""
    for before in (False, True) if any(record.before for record in drawing.records) else (False,):
        view = dataclasses.replace(drawing.view, focus=focus, level=level, before=before)
        if level == "model":
            view = dataclasses.replace(view, level="module", most=MOST_OUTER)
        try:
            picture = drawing.with_view(view)
        except OptionError:  # the graph contains no op of the module
            continue
        if most is not None and sum(len(graph) for graph in picture.boxes.values()) > most:
            continue
        side = "before" if before else "after"
        for paint in _paints(drawing):
            is_same = paint == view.color
            painted = dataclasses.replace(view, color=paint)
            views[focus or "", side, level, paint] = (
                picture if is_same else picture.with_view(painted)
            )


def _closed_modules(views: dict[tuple[str, str, str, str], Drawing]) -> list[str]:
    """Returns the modules that pictures show closed and that have no picture, outermost first."""
    open_modules = {name[0] for name in views}
    paths = {path for picture in views.values() for path in _opens(picture).values()}
    return sorted(paths - open_modules, key=lambda path: (path.count("."), path))


def _opens(drawing: Drawing) -> dict[str, str]:
    """Returns the modules that closed boxes open, by id of the box."""
    return {
        f"box-g{index}.{number}": first_of_folded(f"{box.module}.{box.title}".lstrip("."))
        for index, graph in enumerate(drawing.boxes.values())
        for number, (_, box) in enumerate(graph.nodes(data="box"))
        if box.kind == "module" and sum(count for _, count in box.shares) > 1
    }


def _guess_level(drawing: Drawing) -> str:
    boxes = [box for graph in drawing.boxes.values() for _, box in graph.nodes(data="box")]
    return "module" if any(box.kind == "module" for box in boxes) else "op"


def _members(drawing: Drawing) -> dict[str, list[str]]:
    """Returns the keys of the nodes in each box, by id of the box."""
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
"""Labels of casts in the table, for any cast op."""


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
    if node.effect:
        parts.append(f"effect {number(node.effect)}")
    if node.is_overflow:
        parts.append(f"{node.overflows + node.singular} overflow")
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
"""Descriptions of the table's columns, for an explanation (False) and a report (True)."""


def _notes(drawing: Drawing) -> str:
    """Returns the suspects of a report."""
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
