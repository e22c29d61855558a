"""Writes pictures in the DOT language of Graphviz."""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections import Counter
from typing import TYPE_CHECKING

import graphviz  # type: ignore[import-untyped]

from amp_fx.reports import COLORS, OTHER_COLOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from amp_fx.drawing.boxes import Box, Path, Picture

FAINT, CAST, CACHED = "#777777", "#c0392b", "#1b7f5c"
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


def to_dot(pictures: Mapping[str, Picture], title: str) -> graphviz.Digraph:
    """Returns pictures of graphs by title, each in a frame if there are several."""
    dot = graphviz.Digraph("amp_fx")
    head = _head(title, [box for picture in pictures.values() for box in picture.boxes.values()])
    dot.attr("graph", rankdir="TB", nodesep="0.25", ranksep="0.16", fontname=FONT, fontsize="13")
    dot.attr("graph", labelloc="t", bgcolor="white", tooltip=" ", label=head)
    dot.attr("node", fontname=FONT, fontsize="11", color="#333333", fontcolor="#111111")
    dot.attr("node", margin="0.12,0.05", height="0.3")
    dot.attr("edge", color="#666666", arrowsize="0.6")
    for index, (name, picture) in enumerate(pictures.items()):
        if len(pictures) == 1:
            _Writer(picture, f"g{index}.").draw(dot, (), picture.boxes)
            continue
        with dot.subgraph(name=f"cluster_g{index}") as frame:
            frame.attr(label=graphviz.escape(name), style="rounded", color=FAINT, fontsize="12")
            _Writer(picture, f"g{index}.").draw(frame, (), picture.boxes)
    return dot


class _Writer:
    """Writes one picture, with names that begin with a prefix."""

    def __init__(self, picture: Picture, prefix: str) -> None:
        self.picture = picture
        self.prefix = prefix
        self.names = {name: f"{prefix}{index}" for index, name in enumerate(picture.boxes)}
        self.streams: dict[tuple[str, str, str], list[str]] = {}
        for source, target, label, cast in picture.edges:
            self.streams.setdefault((source, label, cast), []).append(target)

    def draw(self, dot: graphviz.Digraph, path: Path, boxes: Mapping[str, Box]) -> None:
        """Draws the boxes of a module, and frames of the modules inside it."""
        children: dict[Path, dict[str, Box]] = {}
        for name, box in boxes.items():
            children.setdefault(box.path[: len(path) + 1], {})[name] = box
        for child, members in children.items():
            if child == path or len(members) == 1:
                for name, box in members.items():
                    title = ".".join((*box.path[len(path) :], box.title))
                    count = self.picture.counts.get((*box.path, box.title))
                    self._draw_box(dot, name, dataclasses.replace(box, title=title), count)
                continue
            inner = _common([box.path for box in members.values()])
            with dot.subgraph(name=f"cluster_{self.prefix}{'.'.join(child)}") as frame:
                self._draw_title(frame, inner, len(path))
                self.draw(frame, inner, members)
        for (source, label, cast), targets in self.streams.items():
            ends = [self.picture.boxes[name].path for name in (source, *targets)]
            if _common(ends) == path:
                self._draw_stream(dot, source, targets, label, cast)

    def _draw_box(self, dot: graphviz.Digraph, name: str, box: Box, count: int | None) -> None:
        shares = Counter(COLORS[dtype] for dtype in box.dtypes if dtype in COLORS)
        shares = shares or Counter([OTHER_COLOR if box.dtypes else "#ffffff"])
        style = dict(STYLES[box.kind])
        if len(shares) > 1:
            style["style"] = "striped"
        fill = ":".join(f"{color};{n / shares.total():.3f}" for color, n in shares.most_common())
        rows = [
            f"<B>{_shortened(box.title)}{_times(count)}</B>",
            *map(_line, filter(None, box.lines)),
        ]
        label = f"<{'<BR/>'.join(rows)}>"
        tooltip = graphviz.escape(box.tooltip).replace("\n", r"\n")
        fill = fill if len(shares) > 1 else next(iter(shares))
        dot.node(self.names[name], label=label, tooltip=tooltip, fillcolor=fill, **style)

    def _draw_title(self, frame: graphviz.Digraph, path: Path, start: int) -> None:
        """Draws the title of a frame as a node, because arrows would cover the label of a frame."""
        count = self.picture.counts.get(path)
        text = f"<B>{_shortened('.'.join(path[start:]))}{_times(count)}</B>"
        kind = _shortened(self.picture.types.get(path, ""))
        if kind:  # below the name, because frames are as wide as their titles
            text += f'<BR/><I><FONT POINT-SIZE="10">{kind}</FONT></I>'
        name = ".".join(path)
        style = {"shape": "plain", "fontcolor": "#444444", "tooltip": graphviz.escape(name)}
        frame.node(f"title-{self.prefix}{name}", label=f"<{text}>", **style)
        frame.attr(label="", style="rounded,filled", fillcolor="#f7f7f2", color="#aaaaaa")
        frame.attr(penwidth="2" if count else "1", margin="10")

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


def _times(count: int | None) -> str:
    return "" if count is None else f"  x {count}"


def _shortened(text: str) -> str:
    """Returns a name that does not widen its box, as HTML; tooltips have the whole."""
    is_short = len(text) <= 26 or " " in text
    return html.escape(text if is_short else f"{text[:14]}…{text[-11:]}")


def _line(line: str) -> str:
    colors = {"cast": CAST, "casts": CAST, "cached": CACHED}
    parts = [
        f'<FONT COLOR="{colors.get(part.rpartition(" ")[2], "#111111")}">{_shortened(part)}</FONT>'
        for part in line.split(", ")
    ]
    return f'<FONT POINT-SIZE="9">{", ".join(parts)}</FONT>'


def _common(paths: Iterable[Path]) -> Path:
    """Returns the path of the innermost module that contains all modules."""
    pairs = zip(*paths, strict=False)
    return tuple(
        first for first, *_ in itertools.takewhile(lambda names: len({*names}) == 1, pairs)
    )


def _head(title: str, boxes: list[Box]) -> str:
    """Returns the title and the legend."""
    dtypes = {dtype for box in boxes for dtype in box.dtypes}
    colors = {color: f"runs in {dtype}" for dtype, color in COLORS.items() if dtype in dtypes}
    if not dtypes <= COLORS.keys():
        colors[OTHER_COLOR] = "other dtypes"
    cells = [f'<TD BGCOLOR="{color}"> {text} </TD>' for color, text in colors.items()]
    marks = {
        "→ cast, in every call": (CAST, any(box.casts for box in boxes)),
        "cached: cast of a weight, once per write": (CACHED, any(box.cached for box in boxes)),
        "octagon: opaque": ("#333333", any(box.kind == "opaque" for box in boxes)),
    }
    texts = [
        f'<TD><FONT COLOR="{color}"> {text} </FONT></TD>'
        for text, (color, is_shown) in marks.items()
        if is_shown
    ]
    lines = [f"<TD><B>{html.escape(title)}</B></TD>", "".join(cells), "".join(texts)]
    rows = [f'<TR><TD ALIGN="LEFT">{_TABLE.format(line)}</TD></TR>' for line in lines if line]
    return f'<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="0">{"".join(rows)}</TABLE>>'


_TABLE = '<TABLE BORDER="0" CELLSPACING="3" CELLPADDING="2"><TR>{}</TR></TABLE>'
