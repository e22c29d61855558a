"""Writes boxes in the language of Graphviz: their colours, the frames around them, the arrows."""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING

import graphviz  # type: ignore[import-untyped]
import networkx as nx  # type: ignore[import-untyped]

from amp_fx.drawing.heat import WORDS

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from amp_fx.drawing.boxes import Box, BoxGraph


COLORS = {"bfloat16": "#a6cee3", "float16": "#cab2d6", "float32": "#fdd9a0", "float64": "#f4a6a0"}
"""Fill by the dtype that a box runs in."""

OTHER = "#e4e4e4"
"""Fill of what runs in integers, booleans or other dtypes."""

HEAT = ("#f4f4f4", "#fff3c4", "#ffdf80", "#ffb84d", "#ff8534", "#e5412d")
"""Fill by a strength from 0 to 5, of a report of accuracy."""

ALARM = "#b00020"
"""The line around what overflows."""

INK = "#333333"
CAST = "#c0392b"
KEPT = "#1b7f5c"
FAINT = "#999999"


@dataclasses.dataclass(frozen=True)
class Stream:
    """The outputs of a box, and the boxes that take them.

    Attributes:
        source: Name of the box that gives.
        targets: Names of those that take.
        labels: Dtype and shape of each tensor that goes along.
        is_ghost: Whether it leads to or from a cast that was removed.
    """

    source: str
    targets: tuple[str, ...]
    labels: tuple[str, ...]
    is_ghost: bool


def streams_of(graph: BoxGraph) -> list[Stream]:
    """The streams of a graph of boxes: arrows out of a box that say the same are one.

    So the label of a tensor that a layer and the residual connection around it take is there
    once, in front of both.
    """
    targets: dict[tuple[str, tuple[str, ...], bool], list[str]] = {}
    for source, target, data in graph.edges(data=True):
        labels = tuple(label for label in data["labels"] if label)
        targets.setdefault((source, labels, data["is_ghost"]), []).append(target)
    return [Stream(a, tuple(found), labels, g) for (a, labels, g), found in targets.items()]


def split(streams: Iterable[Stream], names: Container[str]) -> tuple[list[Stream], list[Stream]]:
    """The streams among some boxes, and what is left.

    What leaves those boxes loses its label if it is there among them already.
    """
    inside, outside = [], []
    for stream in streams:
        near = tuple(target for target in stream.targets if target in names)
        if stream.source not in names or not near:
            outside.append(stream)
            continue
        inside.append(dataclasses.replace(stream, targets=near))
        if far := tuple(target for target in stream.targets if target not in names):
            outside.append(dataclasses.replace(stream, targets=far, labels=()))
    return inside, outside


Frames = dict[str, dict[str, "Box"]]
"""By the path of a module right inside of another, the boxes in it by name."""


def frames_in(boxes: dict[str, Box], streams: list[Stream], path: str) -> Frames:
    """The frames right inside of the frame of a module (``path``); a box of one alone needs none.

    A list of modules whose members take turns with those of another list is left and entered
    again: its frame would hold together what is computed far apart, and arrows would go up. Such
    modules get a frame each instead. The module's own boxes are in none of those inside.
    """
    frames: Frames = {}
    for name, box in boxes.items():
        if box.module != path:
            frames.setdefault(_child(path, box.module), {})[name] = box
    while torn := _first_torn(frames, streams):
        members = frames.pop(torn)
        for name, box in members.items():
            inner = name if box.module == torn else _child(torn, box.module)
            frames.setdefault(inner, {})[name] = box
    return {
        child if len(found) == 1 else _only_inside(child, found): found
        for child, found in frames.items()
    }


def _first_torn(frames: Frames, streams: list[Stream]) -> str:
    """A frame of several modules that arrows leave and come back to."""
    owner = {name: path for path, found in frames.items() for name in found}
    between = nx.DiGraph()
    for stream in streams:
        a = owner.get(stream.source, f"box {stream.source}")
        for target in stream.targets:
            b = owner.get(target, f"box {target}")
            if a != b:
                between.add_edge(a, b)
    torn = {n for part in nx.strongly_connected_components(between) if len(part) > 1 for n in part}
    for path, found in frames.items():
        is_list = all(box.module != path or box.kind == "module" for box in found.values())
        if len(found) > 1 and is_list and path in torn:
            return path
    return ""


def _child(path: str, module: str) -> str:
    """The module right inside of one that leads to another."""
    start = len(path) + 1 if path else 0
    return module[:start] + module[start:].partition(".")[0]


def _only_inside(path: str, boxes: dict[str, Box]) -> str:
    """A module, or the one in it that has all of its boxes: one frame does for both."""
    inside = {box.module for box in boxes.values()}
    while path not in inside and len(inner := {_child(path, m) for m in inside}) == 1:
        [path] = inner
    return path


FONT = "Helvetica,Arial,sans-serif"

# Shape, line and style by kind; the fill is the dtype's where ``style`` has "filled".
STYLES: dict[str, dict[str, str]] = {
    "op": {"shape": "box", "style": "filled,rounded"},
    "module": {"shape": "box", "style": "filled", "penwidth": "1.4"},
    "cast": {"shape": "hexagon", "style": "filled", "color": CAST, "penwidth": "2.2"},
    "kept": {"shape": "cylinder", "style": "filled", "color": KEPT, "penwidth": "2.2"},
    "ghost": {"shape": "hexagon", "style": "dashed", "color": FAINT, "fontcolor": FAINT},
    "island": {"shape": "octagon", "style": "filled", "penwidth": "2", "peripheries": "2"},
    "input": {"shape": "ellipse", "style": "filled"},
    "output": {"shape": "ellipse", "style": "filled", "penwidth": "2"},
    "outside": {"shape": "box", "style": "dashed,rounded", "color": FAINT, "fontcolor": "#666666"},
}


@dataclasses.dataclass(frozen=True)
class Page:
    """The title and settings of a picture.

    Attributes:
        title: Written above it.
        counts: How many modules a folded path stands for.
        types: Classes of modules by their paths.
        has_legend: Whether colours and shapes are explained below.
        levels: How strongly nodes are coloured, by name; None colours by dtype.
        outlined: Names of nodes whose boxes get a dashed line.
        measure: What the strength stands for.
    """

    title: str
    counts: dict[str, int]
    types: dict[str, str]
    has_legend: bool = True
    levels: Mapping[str, int] | None = None
    outlined: frozenset[str] = frozenset()
    measure: str = ""


def to_dot(graphs: dict[str, BoxGraph], page: Page) -> graphviz.Digraph:
    """A picture of some graphs.

    Args:
        graphs: By title, the graphs; one alone gets no frame.
        page: What the picture is of.
    """
    dot = graphviz.Digraph("amp_fx")
    dot.attr("graph", rankdir="TB", nodesep="0.3", ranksep="0.16", fontname=FONT, fontsize="13")
    dot.attr("graph", labelloc="t", bgcolor="white", tooltip=" ")
    dot.attr("node", fontname=FONT, fontsize="11", color=INK, fontcolor="#111111")
    dot.attr("node", margin="0.12,0.05", height="0.3")
    dot.attr("edge", fontname=FONT, fontsize="9", color="#666666", fontcolor="#555555")
    dot.attr("edge", arrowsize="0.6")
    dot.attr(label=_label(page, graphs))
    for index, (title, graph) in enumerate(graphs.items()):
        prefix = f"g{index}."
        if len(graphs) == 1:
            _draw_graph(dot, graph, page, prefix)
            continue
        with dot.subgraph(name=f"cluster_{prefix}") as frame:
            frame.attr(label=graphviz.escape(title), style="rounded", color="#777777")
            frame.attr(fontsize="12")
            _draw_graph(frame, graph, page, prefix)
    return dot


def _draw_graph(dot: graphviz.Digraph, graph: BoxGraph, page: Page, prefix: str) -> None:
    names = {name: f"{prefix}{index}" for index, name in enumerate(graph)}
    _draw_module(dot, dict(graph.nodes(data="box")), streams_of(graph), "", names, page, prefix)


def _draw_module(
    dot: graphviz.Digraph,
    boxes: dict[str, Box],
    streams: list[Stream],
    path: str,
    names: dict[str, str],
    page: Page,
    prefix: str,
) -> None:
    """Draws the boxes of a module, the modules in it as frames, and what goes between them.

    A stream is drawn in the innermost frame that has all of its boxes, its label too.
    """
    frames = frames_in(boxes, streams, path)
    for name, box in boxes.items():
        if box.module == path:
            _draw_box(dot, names[name], box, page)
    for child, found in frames.items():
        if len(found) == 1:
            [(name, box)] = found.items()
            _draw_box(dot, names[name], _named_after(box, path, page), page)
            continue
        inside, streams = split(streams, found)
        with dot.subgraph(name=f"cluster_{prefix}{child}") as frame:
            _draw_title(frame, child, path, page, prefix)
            _draw_module(frame, found, inside, child, names, page, prefix)
    for stream in streams:
        _draw_stream(dot, stream, names)


def _draw_stream(dot: graphviz.Digraph, stream: Stream, names: dict[str, str]) -> None:
    """Arrows, with the label as a box without lines on their way.

    Graphviz keeps boxes inside of their frame and out of all others; labels of edges it lets
    lie across.
    """
    style = {"style": "dashed", "color": FAINT} if stream.is_ghost else {}
    source, targets = names[stream.source], [names[target] for target in stream.targets]
    if stream.labels:
        label = f"{source}-{targets[0]}"
        text = _lines(stream.labels)
        dot.node(label, label=text, shape="plain", fontsize="9", fontcolor="#555555", tooltip=text)
        dot.edge(source, label, arrowhead="none", **style)
        source = label
    for target in targets:
        dot.edge(source, target, **style)


def _lines(labels: tuple[str, ...]) -> str:
    shown = [graphviz.escape(label) for label in labels][:2]
    more = [f"+{len(labels) - 2} more"] if len(labels) > 2 else []
    return r"\n".join([*shown, *more])


def _named_after(box: Box, path: str, page: Page) -> Box:
    """A box that is alone in its module: it says so itself, without a frame."""
    name = box.module[len(path) + 1 if path else 0 :]
    if box.kind == "module":
        return dataclasses.replace(box, title=f"{name}.{box.title}", module=path)
    kind = page.types.get(box.module, "")
    return dataclasses.replace(box, lines=(*box.lines, f"{name}  {kind}" if kind else name))


def _draw_title(frame: graphviz.Digraph, child: str, path: str, page: Page, prefix: str) -> None:
    """The frame of a module, and its name as a box without lines in the first row.

    The label of a frame would lie under the arrows that come in.
    """
    name = child[len(path) + 1 if path else 0 :]
    kind = page.types.get(child, "")
    times = f"<B>  x{page.counts[child]}</B>" if child in page.counts else ""
    text = f"{html.escape(name)}{times}{f'  <I>{html.escape(kind)}</I>' if kind else ''}"
    tip = graphviz.escape(child)
    style = {"shape": "plain", "fontcolor": "#444444", "tooltip": tip}
    frame.node(f"title-{prefix}{child}", label=f"<{text}>", **style)
    folded = child in page.counts
    frame.attr(label="", tooltip=tip, style="rounded,filled" if folded else "rounded")
    frame.attr(color="#aaaaaa", fillcolor="#f7f7f2", penwidth="2" if folded else "1", margin="10")


def _draw_box(dot: graphviz.Digraph, name: str, box: Box, page: Page) -> None:
    style = dict(STYLES[box.kind])
    if page.levels is not None and "filled" in style["style"]:
        style["fillcolor"] = HEAT[max((page.levels.get(m, 0) for m in box.members), default=0)]
    elif "filled" in style["style"]:
        style["fillcolor"] = _fill(box)
        if box.kind == "module" and len(box.shares) > 1:
            style["style"] = "striped"
    if page.outlined.intersection(box.members):
        style |= {"style": f"{style['style']},dashed", "color": ALARM, "penwidth": "3"}
    lines = [f'<FONT POINT-SIZE="9">{html.escape(line)}</FONT>' for line in box.lines]
    above = ['<FONT POINT-SIZE="5"> </FONT>'] if box.kind == "kept" else []  # the lid
    label = "<BR/>".join([*above, f"<B>{html.escape(box.title)}{_times(box, page)}</B>", *lines])
    tooltip = graphviz.escape(box.tooltip).replace("\n", r"\n")
    dot.node(name, label=f"<{label}>", id=f"box-{name}", tooltip=tooltip, **style)


def _times(box: Box, page: Page) -> str:
    """Returns ``x12`` for a closed module that stands for twelve; an empty string for one."""
    path = f"{box.module}.{box.title}" if box.module else box.title
    return f"  x{page.counts[path]}" if box.kind == "module" and path in page.counts else ""


def _fill(box: Box) -> str:
    """The dtype's colour; stripes as wide as the dtypes' parts for a module of several."""
    if not box.shares:
        return "#ffffff"
    if box.kind != "module" or len(box.shares) == 1:
        return COLORS.get(box.shares[0][0], OTHER)
    total = sum(count for _, count in box.shares)
    parts = [f"{COLORS.get(d, OTHER)};{count / total:.3f}" for d, count in box.shares]
    parts[-1] = parts[-1].partition(";")[0]  # Graphviz gives the last what is left
    return ":".join(parts)


def _label(page: Page, graphs: dict[str, BoxGraph]) -> str:
    """The title and the legend, as a table above the picture."""
    title = f'<TR><TD COLSPAN="2" ALIGN="LEFT"><B>{html.escape(page.title)}</B></TD></TR>'
    if not page.has_legend:
        return f'<<TABLE BORDER="0">{title}</TABLE>>'
    boxes = [box for graph in graphs.values() for _, box in graph.nodes(data="box")]
    dtypes = [dtype for box in boxes for dtype, _ in box.shares]
    kinds = {box.kind for box in boxes}
    counted = any(" kept" in line for box in boxes if box.kind == "module" for line in box.lines)
    if not counted or "kept" in kinds:
        kinds.discard("module")
    fills = _heat_legend(page) if page.levels is not None else _dtype_legend(dtypes)
    signs = [_sign(line, "ROUNDED", text) for k, (line, text) in LEGEND.items() if k in kinds]
    row = '<TABLE BORDER="0" CELLSPACING="3" CELLPADDING="2"><TR>{}</TR></TABLE>'
    cells = [row.format(each) for each in (fills, "".join(signs)) if each]
    rows = "".join(f'<TR><TD ALIGN="LEFT">{each}</TD></TR>' for each in cells)
    return f'<<TABLE BORDER="0" CELLSPACING="2">{title}{rows}</TABLE>>'


def _dtype_legend(dtypes: list[str]) -> str:
    colors = [d for d in COLORS if d in dtypes]
    others = ["other dtypes"] if any(d not in COLORS for d in dtypes) else []
    return "".join(_swatch(COLORS.get(d, OTHER), f"runs in {d}") for d in [*colors, *others])


def _heat_legend(page: Page) -> str:
    words = WORDS[page.measure]
    fills = "".join(_swatch(color, word) for color, word in zip(HEAT, words, strict=True))
    return fills + (_sign(ALARM, "DASHED", "dashed: overflows here") if page.outlined else "")


def _swatch(color: str, text: str) -> str:
    return _cell(f'BGCOLOR="{color}" BORDER="1" COLOR="{INK}"', html.escape(text))


def _sign(color: str, line: str, text: str) -> str:
    return _cell(f'BORDER="2" COLOR="{color}" STYLE="{line}"', text)


def _cell(style: str, text: str) -> str:
    return f'<TD {style}><FONT POINT-SIZE="10">  {text}  </FONT></TD>'


LEGEND = {
    "cast": (CAST, "hexagon: cast, made in every call"),
    "kept": (KEPT, "cylinder: cast of a weight, kept across calls"),
    "module": (INK, "kept, in a module: casts of its weights, kept across calls"),
    "ghost": (FAINT, "dashed: cast removed"),
    "island": (INK, "octagon: island under native autocast"),
}
"""Kinds of boxes whose shape says something: the colour of the line, the meaning."""
