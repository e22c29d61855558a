"""Writes pictures in the DOT language of Graphviz."""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections import Counter
from typing import TYPE_CHECKING

import graphviz  # type: ignore[import-untyped]

from amp_fx.drawing.folding import first_path, is_inside, levels
from amp_fx.reports import COLORS, OTHER_COLOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from amp_fx.drawing.boxes import Box, Edge, Picture

INK, FAINT, CAST, CACHED = "#333333", "#777777", "#c0392b", "#1b7f5c"
FONT = "Helvetica,Arial,sans-serif"

STYLES: Mapping[str, Mapping[str, str]] = {
    "op": {"shape": "box", "style": "filled,rounded"},
    "module": {"shape": "box", "style": "filled", "penwidth": "1.4"},
    "opaque": {"shape": "octagon", "style": "filled", "penwidth": "2", "peripheries": "2"},
    "input": {"shape": "ellipse", "style": "filled"},
    "output": {"shape": "ellipse", "style": "filled", "penwidth": "2"},
    "outside": {"shape": "box", "style": "dashed,rounded", "color": FAINT, "fontcolor": FAINT},
}
"""Shape, line and style by kind of box. Filled boxes have the color of their dtype."""


@dataclasses.dataclass(frozen=True)
class Page:
    """Title and settings of a picture.

    Attributes:
        title: Text above the picture.
        types: Classes of modules by path.
        counts: Number of modules in each folded path.
        has_legend: Whether the picture has a legend.
    """

    title: str
    types: Mapping[str, str]
    counts: Mapping[str, int]
    has_legend: bool


def to_dot(pictures: Mapping[str, Picture], page: Page) -> graphviz.Digraph:
    """Returns pictures of graphs by title, each in a frame if there are several."""
    dot = graphviz.Digraph("amp_fx")
    dot.attr("graph", rankdir="TB", nodesep="0.25", ranksep="0.16", fontname=FONT, fontsize="13")
    dot.attr("graph", labelloc="t", bgcolor="white", tooltip=" ", label=_head(pictures, page))
    dot.attr("node", fontname=FONT, fontsize="11", color=INK, fontcolor="#111111")
    dot.attr("node", margin="0.12,0.05", height="0.3")
    dot.attr("edge", color="#666666", arrowsize="0.6")
    for index, (title, picture) in enumerate(pictures.items()):
        if len(pictures) == 1:
            _Writer(picture, page, f"g{index}.").draw(dot, "")
            continue
        with dot.subgraph(name=f"cluster_g{index}") as frame:
            frame.attr(label=graphviz.escape(title), style="rounded", color=FAINT, fontsize="12")
            _Writer(picture, page, f"g{index}.").draw(frame, "")
    return dot


class _Writer:
    """Writes one picture, with names that begin with a prefix."""

    def __init__(self, picture: Picture, page: Page, prefix: str) -> None:
        self.boxes = picture.boxes
        self.page = page
        self.prefix = prefix
        self.names = {name: f"{prefix}{index}" for index, name in enumerate(picture.boxes)}
        self.streams: dict[tuple[str, str, str], list[str]] = {}
        for source, target, label, cast in picture.edges:
            self.streams.setdefault((source, label, cast), []).append(target)

    def draw(self, dot: graphviz.Digraph, path: str) -> None:
        """Draws the boxes of a module, and frames of the modules inside it."""
        children: dict[str, dict[str, Box]] = {}
        for name, box in self.boxes.items():
            if box.module == path:
                self._draw_box(dot, name, box)
            elif is_inside(box.module, path):
                child = ".".join(levels(box.module)[: len(levels(path)) + 1])
                children.setdefault(child, {})[name] = box
        for child, members in children.items():
            if len(members) == 1:
                [(name, box)] = members.items()
                inner = box.module[len(path) + 1 if path else 0 :]
                self._draw_box(dot, name, dataclasses.replace(box, title=f"{inner}.{box.title}"))
                continue
            inner = _common([box.module for box in members.values()])  # one frame for several
            with dot.subgraph(name=f"cluster_{self.prefix}{child}") as frame:
                self._draw_title(frame, inner, path)
                self.draw(frame, inner)
        for (source, label, cast), targets in self.streams.items():
            modules = [self.boxes[name].module for name in (source, *targets)]
            if _common(modules) == path:
                self._draw_stream(dot, source, targets, label, cast)

    def _draw_box(self, dot: graphviz.Digraph, name: str, box: Box) -> None:
        colors = [COLORS.get(dtype, OTHER_COLOR) for dtype in box.dtypes]
        shares = Counter(color for color in colors if color != OTHER_COLOR) or Counter(colors)
        [(fill, _), *others] = shares.most_common() or [("#ffffff", 0)]
        path = ".".join(filter(None, (box.module, box.title)))
        title = f"<B>{html.escape(_shortened(box.title))}{self._times(path)}</B>"
        rows = [title, *map(_line, box.lines)]
        label = _rows(rows, _bar(shares) if others else "")
        tooltip = graphviz.escape(box.tooltip).replace("\n", r"\n")
        style = {**STYLES[box.kind], "fillcolor": "#ffffff" if others else fill}
        dot.node(self.names[name], label=label, tooltip=tooltip, **style)

    def _times(self, path: str) -> str:
        count = self.page.counts.get(path)
        return "" if count is None else f"  x {count}"

    def _draw_title(self, frame: graphviz.Digraph, child: str, path: str) -> None:
        """Draws the title of a frame as a node, because arrows would cover the label of a frame."""
        kind = html.escape(_shortened(self.page.types.get(first_path(child), "")))
        name = html.escape(_shortened(child[len(path) + 1 if path else 0 :]) + self._times(child))
        text = f"<B>{name}</B>"
        if kind:  # below the name, because frames are as wide as their titles
            text += f'<BR/><I><FONT POINT-SIZE="10">{kind}</FONT></I>'
        style = {"shape": "plain", "fontcolor": "#444444", "tooltip": graphviz.escape(child)}
        frame.node(f"title-{self.prefix}{child}", label=f"<{text}>", **style)
        is_folded = child in self.page.counts
        frame.attr(label="", style="rounded,filled", fillcolor="#f7f7f2", color="#aaaaaa")
        frame.attr(penwidth="2" if is_folded else "1", margin="10")

    def _draw_stream(
        self, dot: graphviz.Digraph, source: str, targets: list[str], label: str, cast: str
    ) -> None:
        """Draws arrows, with their label as a node, which Graphviz places inside of the frame."""
        style = {"color": CAST, "penwidth": "1.8"} if cast else {}
        tail = self.names[source]
        if label:
            name = f"{tail}-{self.names[targets[0]]}-{label}{cast}"
            text = f"<B>{cast} → </B>{html.escape(label)}" if cast else html.escape(label)
            color = CAST if cast else "#555555"
            dot.node(name, label=f"<{text}>", shape="plain", fontsize="9", fontcolor=color)
            # Lines end above and begin below the text, so that none crosses it.
            dot.edge(tail, name, arrowhead="none", headport="n", **style)
            tail, style = name, {**style, "tailport": "s"}
        for target in targets:
            dot.edge(tail, self.names[target], **style)


def _common(modules: list[str]) -> str:
    """Returns the path of the innermost module that contains all modules."""
    pairs = itertools.takewhile(
        lambda names: len({*names}) == 1, zip(*map(levels, modules), strict=False)
    )
    return ".".join(first for first, *_ in pairs)


def _line(line: str) -> str:
    color = CACHED if line.endswith(" cached") else CAST if "cast" in line else "#111111"
    return f'<FONT POINT-SIZE="9" COLOR="{color}">{html.escape(_shortened(line))}</FONT>'


def _shortened(text: str) -> str:
    """Returns a name that does not widen its box; tooltips have the whole."""
    return text if len(text) <= 26 or " " in text else f"{text[:14]}…{text[-11:]}"


def _rows(rows: Iterable[str], bar: str = "") -> str:
    """Returns the label of a box with one row per text, and a bar below."""
    cells = "".join(f"<TR><TD>{row}</TD></TR>" for row in rows)
    return f"<<TABLE {_TIGHT}>{cells}{bar}</TABLE>>"


def _bar(shares: Counter[str]) -> str:
    """Returns a row with a bar of colors in proportion to the dtypes of a box."""
    cells = "".join(
        f'<TD BGCOLOR="{color}" WIDTH="{90 * n / shares.total():.0f}" HEIGHT="6"></TD>'
        for color, n in shares.most_common()
    )
    bar = f'<TABLE FIXEDSIZE="TRUE" WIDTH="90" HEIGHT="6" {_TIGHT}><TR>{cells}</TR></TABLE>'
    return f'<TR><TD CELLPADDING="2">{bar}</TD></TR>'


_TIGHT = 'BORDER="0" CELLSPACING="0" CELLPADDING="0"'


def _head(pictures: Mapping[str, Picture], page: Page) -> str:
    """Returns the title and the legend."""
    boxes = [box for picture in pictures.values() for box in picture.boxes.values()]
    edges: list[Edge] = [edge for picture in pictures.values() for edge in picture.edges]
    dtypes = {dtype for box in boxes for dtype in box.dtypes}
    swatches = [
        _swatch(color, f"runs in {dtype}") for dtype, color in COLORS.items() if dtype in dtypes
    ]
    swatches += [_swatch(OTHER_COLOR, "other dtypes")] if dtypes.difference(COLORS) else []
    marks = []
    if any(edge.cast for edge in edges) or any(box.casts for box in boxes):
        marks.append(_cell(CAST, "→ cast, in every call"))
    if any(box.cached for box in boxes):
        marks.append(_cell(CACHED, "cached: cast of a weight, once per update"))
    if any(box.kind == "opaque" for box in boxes):
        marks.append(_cell(INK, "octagon: opaque, under native autocast"))
    title = f'<TR><TD ALIGN="LEFT"><B>{html.escape(page.title)}</B></TD></TR>'
    rows = filter(None, (swatches, marks)) if page.has_legend else ()
    table = '<TABLE BORDER="0" CELLSPACING="3" CELLPADDING="2"><TR>{}</TR></TABLE>'
    lines = [f'<TR><TD ALIGN="LEFT">{table.format("".join(row))}</TD></TR>' for row in rows]
    return f'<<TABLE BORDER="0" CELLSPACING="0">{title}{"".join(lines)}</TABLE>>'


def _swatch(color: str, text: str) -> str:
    return f'<TD BGCOLOR="{color}"><FONT POINT-SIZE="10"> {text} </FONT></TD>'


def _cell(color: str, text: str) -> str:
    return f'<TD><FONT POINT-SIZE="10" COLOR="{color}"> {text} </FONT></TD>'
