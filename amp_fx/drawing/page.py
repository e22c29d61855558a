"""A picture as one HTML file that needs nothing else: pan, zoom, search, reasons, table."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from amp_fx.explanation.table import bare_op, human, treatment
from amp_fx.graphs.places import short_path
from amp_fx.numerics.picture import MEASURES
from amp_fx.numerics.records import number
from amp_fx.numerics.report import MOST

if TYPE_CHECKING:
    from amp_fx.drawing.draw import Drawing
    from amp_fx.explanation.records import GraphRecord, NodeRecord
    from amp_fx.numerics.records import OpRecord
    from amp_fx.numerics.report import AccuracyReport

MOST_OPS = 250
"""How many boxes a picture of all ops may have to go into the page: larger ones take long."""


def page_of(drawing: Drawing) -> str:
    """The page.

    It holds the picture as it was asked for, its modules and its ops, after and before the
    rewrite; the user chooses. Where there are too many ops, only modules are shown.
    """
    views = _views(drawing)
    templates = "\n".join(
        f'<template data-view="{name}">{_inline(view.svg)}</template>'
        for name, view in views.items()
    )
    data = {
        "boxes": {name.rpartition("-")[0]: _members(view) for name, view in views.items()},
        "first": next(iter(views)),
        "paints": _paints(drawing),
        "column": "treatment" if drawing.report is None else "measured",
        "before": _nodes(drawing, before=True),
        "after": _nodes(drawing, before=False),
        "casts": _casts(drawing),
    }
    template = files("amp_fx.drawing").joinpath("page.html").read_text(encoding="utf-8")
    explanation = drawing.explanation
    contents = {
        "@TITLE@": html.escape(
            f"{explanation.model} on {explanation.device_type} {explanation.dtype}"
        ),
        "@SUMMARY@": _summary(drawing),
        "@NOTES@": _notes(drawing),
        "@VIEWS@": templates,
        "@DATA@": json.dumps(data).replace("<", "\\u003c"),
    }
    # All at once: a module may have the name of a mark.
    return re.sub("|".join(contents), lambda mark: contents[mark[0]], template)


def _paints(drawing: Drawing) -> list[str]:
    """What boxes can be coloured by, that which was asked for first."""
    names = ("dtype",) if drawing.report is None else (*MEASURES, "dtype")
    return sorted(names, key=lambda name: name != drawing.view.color)


def _views(drawing: Drawing) -> dict[str, Drawing]:
    """By name, the pictures that the page switches between; the one asked for comes first.

    Where boxes lie does not depend on what they are coloured by.
    """
    found: dict[str, Drawing] = {}
    asked = drawing.view.level or _guess_level(drawing)
    levels = (asked, "op" if asked == "module" else "module")
    sides = (False, True) if any(record.before for record in drawing.records) else (False,)
    for level in levels:
        for before in sides:
            view = dataclasses.replace(drawing.view, level=level, before=before)
            made = drawing.with_view(view)
            num_boxes = sum(len(graph) for graph in made.boxes.values())
            if level != asked and num_boxes > MOST_OPS:
                continue
            for paint in _paints(drawing):
                painted = dataclasses.replace(view, color=paint)
                found[f"{'before' if before else 'after'}-{level}-{paint}"] = (
                    made if paint == view.color else made.with_view(painted)
                )
    return found


def _guess_level(drawing: Drawing) -> str:
    boxes = [box for graph in drawing.boxes.values() for _, box in graph.nodes(data="box")]
    return "module" if any(box.kind == "module" for box in boxes) else "op"


def _inline(svg: str) -> str:
    return svg[svg.index("<svg") :]


def _members(drawing: Drawing) -> dict[str, list[str]]:
    """By the id of a box in the picture, the nodes that it stands for."""
    return {
        f"box-g{index}.{number}": [_key(drawing.records[index], name) for name in box.members]
        for index, graph in enumerate(drawing.boxes.values())
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


_LABELS = {"cast": "cast", "kept_cast": "kept cast", "copy": "kept copy"}
"""What casts are called in the table, whatever op makes them."""


def _node(record: GraphRecord, node: NodeRecord, measured: dict[str, str]) -> dict[str, Any]:
    return {
        "label": _LABELS.get(node.kind, bare_op(node.op)),
        "listed": node.kind not in ("copy", "output"),
        "key": _key(record, node.name),
        "name": node.name,
        "kind": node.kind,
        "op": node.op,
        "module": node.module,
        "type": node.module_type,
        "source": f"{short_path(node.file)}:{node.line}" if node.file else "",
        "code": node.code,
        "dtype": node.dtype,
        "treatment": treatment(node),
        "text": measured.get(node.name) or treatment(node) or node.kind,
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


def _notes(drawing: Drawing) -> str:
    """The suspects of a report."""
    if drawing.report is None:
        return ""
    lines = [f"{i}. {suspect}" for i, suspect in enumerate(drawing.report.suspects[:MOST], 1)]
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines or ["no suspects"])


def _summary_of_report(report: AccuracyReport) -> str:
    loss = f"loss <b>{report.loss:.6g}</b> ({report.reference} {report.reference_loss:.6g})"
    error = f"error of the outputs <b>{number(report.output_error)}</b>"
    parts = [
        f"<b>{len(report.nodes)}</b> ops, forward and backward",
        error if report.loss is None else loss,
        f"<b>{len(report.suspects)}</b> suspects",
    ]
    return " &middot; ".join(parts)


def _summary(drawing: Drawing) -> str:
    if drawing.report is not None:
        return _summary_of_report(drawing.report)
    totals = drawing.explanation.totals
    share = ", ".join(
        f"{part:.0%} {html.escape(dtype)}" for dtype, part in totals.flop_share.items()
    )
    parts = [
        f"<b>{totals.num_ops}</b> ops",
        f"<b>{totals.casts_left}</b> casts per call ({human(totals.bytes_cast)})",
        f"<b>{totals.casts_kept}</b> casts kept (save {human(totals.bytes_kept)} per call)",
        f"<b>{totals.casts_removed}</b> taken out",
        f"FLOPs: {share or 'none counted'}",
    ]
    if totals.num_breaks:
        parts.append(f"<b>{totals.num_breaks}</b> graph breaks")
    if totals.num_islands:
        parts.append(f"<b>{totals.num_islands}</b> islands")
    return " &middot; ".join(parts)
