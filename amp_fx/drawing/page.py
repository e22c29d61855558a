"""A picture as one HTML file that needs nothing else: pan, zoom, search, reasons, table."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from amp_fx.drawing.colors import COLORS, HEAT, OTHER
from amp_fx.explanation.places import short_path
from amp_fx.explanation.rows import bare_op, treatment
from amp_fx.explanation.table import human
from amp_fx.numerics.picture import MEASURES, levels_of

if TYPE_CHECKING:
    from amp_fx.drawing.draw import Drawing
    from amp_fx.explanation.records import GraphRecord, NodeRecord

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
        "boxes": {name: _members(view) for name, view in views.items()},
        "first": next(iter(views)),
        "before": _nodes(drawing, before=True),
        "after": _nodes(drawing, before=False),
        "casts": _casts(drawing),
        "levels": _levels(drawing),
        "heat": HEAT,
        "colors": {**COLORS, "other": OTHER},
        "color": drawing.view.color,
    }
    template = files("amp_fx.drawing").joinpath("page.html").read_text(encoding="utf-8")
    explanation = drawing.explanation
    contents = {
        "@TITLE@": html.escape(
            f"{explanation.model} on {explanation.device_type} {explanation.dtype}"
        ),
        "@SUMMARY@": _summary(drawing),
        "@VIEWS@": templates,
        "@DATA@": json.dumps(data).replace("<", "\\u003c"),
    }
    # All at once: a module may have the name of a mark.
    return re.sub("|".join(contents), lambda mark: contents[mark[0]], template)


def _levels(drawing: Drawing) -> dict[str, dict[str, int]]:
    """By measure of a report, how strongly each node is coloured; empty without one."""
    if drawing.report is None:
        return {}
    keys = {
        node.name: _key(record, node.name) for record in drawing.records for node in record.nodes
    }
    return {
        measure: {
            keys[n]: level for n, level in levels_of(drawing.report, measure).items() if n in keys
        }
        for measure in MEASURES
    }


def _views(drawing: Drawing) -> dict[str, Drawing]:
    """By name, the pictures that the page switches between; the one asked for comes first."""
    from amp_fx.drawing.draw import Drawing as _Drawing

    found: dict[str, Drawing] = {}
    asked = drawing.view.level or _guess_level(drawing)
    levels = (asked, "op" if asked == "module" else "module")
    sides = (False, True) if any(record.before for record in drawing.records) else (False,)
    for level in levels:
        for before in sides:
            view = dataclasses.replace(drawing.view, level=level, before=before)
            made = _Drawing(drawing.explanation, drawing.records, view, drawing.report)
            num_boxes = sum(len(graph) for graph in made.boxes.values())
            if level == asked or num_boxes <= MOST_OPS:
                found[f"{'before' if before else 'after'}-{level}"] = made
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
    return [
        _node(record, node)
        for record in drawing.records
        for node in (record.before if before else record.nodes)
        if node.kind != "weight"
    ]


_LABELS = {"cast": "cast", "kept_cast": "kept cast", "copy": "kept copy"}
"""What casts are called in the table, whatever op makes them."""


def _node(record: GraphRecord, node: NodeRecord) -> dict[str, Any]:
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
        "origin": node.origin,
        "reason": node.reason,
        "inputs": [_key(record, name) for name in node.inputs],
        "outputs": [f"{t.dtype} [{', '.join(map(str, t.shape))}]" for t in node.outputs],
        "flops": human(node.flops, "") if node.flops else "",
    }


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


def _summary(drawing: Drawing) -> str:
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
