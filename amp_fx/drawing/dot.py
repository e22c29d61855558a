"""Converts graphs of boxes to the DOT language of Graphviz."""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING

import graphviz  # type: ignore[import-untyped]
import networkx as nx  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from amp_fx.drawing.boxes import Box, BoxGraph


COLORS = {"bfloat16": "#a6cee3", "float16": "#cab2d6", "float32": "#fdd9a0", "float64": "#f4a6a0"}
"""Fill colors by compute dtype."""

OTHER = "#e4e4e4"
"""Fill color of integers, booleans and other dtypes."""

INK = "#333333"
CAST = "#c0392b"
KEPT = "#1b7f5c"
FAINT = "#999999"


@dataclasses.dataclass(frozen=True)
class Stream:
    """Outputs of a box, and the boxes that read them.

    Attributes:
        source: Name of the box.
        targets: Names of the boxes that read the outputs.
        labels: Dtype and shape of each tensor.
        is_ghost: Whether the source or a target is a removed cast.
    """

    source: str
    targets: tuple[str, ...]
    labels: tuple[str, ...]
    is_ghost: bool


def streams_of(graph: BoxGraph) -> list[Stream]:
    """Returns the streams of a graph. Edges from one box with the same labels are one stream.

    For example, a tensor that a layer and a residual connection read has one label.
    """
    targets: dict[tuple[str, tuple[str, ...], bool], list[str]] = {}
    for source, target, data in graph.edges(data=True):
        labels = tuple(label for label in data["labels"] if label)
        targets.setdefault((source, labels, data["is_ghost"]), []).append(target)
    return [
        Stream(source, tuple(names), labels, is_ghost)
        for (source, labels, is_ghost), names in targets.items()
    ]


def split(streams: Iterable[Stream], names: Container[str]) -> tuple[list[Stream], list[Stream]]:
    """Returns the streams between the named boxes, and the remaining streams.

    A stream with targets in both parts is split; only the first part has its labels.
    """
    inside, outside = [], []
    for stream in streams:
        inner = tuple(target for target in stream.targets if target in names)
        if stream.source not in names or not inner:
            outside.append(stream)
            continue
        inside.append(dataclasses.replace(stream, targets=inner))
        if outer := tuple(target for target in stream.targets if target not in names):
            outside.append(dataclasses.replace(stream, targets=outer, labels=()))
    return inside, outside


Frames = dict[str, dict[str, "Box"]]
"""Boxes by name, for each module that has a frame."""


def frames_in(boxes: dict[str, Box], streams: list[Stream], path: str) -> Frames:
    """Returns the frames directly inside the frame of module ``path``.

    If the modules of two lists alternate, a frame around each list would contain distant boxes and
    cause upward arrows. Each module of such a list has a separate frame instead. Boxes that belong
    to ``path`` itself are not in any of the frames.
    """
    frames: Frames = {}
    for name, box in boxes.items():
        if box.module != path:
            frames.setdefault(_child(path, box.module), {})[name] = box
    while reentered := _first_reentered(frames, streams):
        members = frames.pop(reentered)
        for name, box in members.items():
            inner = name if box.module == reentered else _child(reentered, box.module)
            frames.setdefault(inner, {})[name] = box
    return {
        child if len(members) == 1 else _innermost_common(child, members): members
        for child, members in frames.items()
    }


def _first_reentered(frames: Frames, streams: list[Stream]) -> str:
    """Returns the first frame of several modules that arrows leave and enter again, or ``""``."""
    owner = {name: path for path, members in frames.items() for name in members}
    between = nx.DiGraph()
    for stream in streams:
        a = owner.get(stream.source, f"box {stream.source}")
        for target in stream.targets:
            b = owner.get(target, f"box {target}")
            if a != b:
                between.add_edge(a, b)
    in_cycles: set[str] = set()
    for component in nx.strongly_connected_components(between):
        if len(component) > 1:
            in_cycles |= component
    for path, members in frames.items():
        is_list = all(box.module != path or box.kind == "module" for box in members.values())
        if len(members) > 1 and is_list and path in in_cycles:
            return path
    return ""


def _child(path: str, module: str) -> str:
    """Returns the module directly inside ``path`` that contains ``module``."""
    start = len(path) + 1 if path else 0
    return module[:start] + module[start:].partition(".")[0]


def _innermost_common(path: str, boxes: dict[str, Box]) -> str:
    """Returns the innermost module inside ``path`` that contains all boxes."""
    modules = {box.module for box in boxes.values()}
    while path not in modules:
        children = {_child(path, module) for module in modules}
        if len(children) != 1:
            break
        [path] = children
    return path


FONT = "Helvetica,Arial,sans-serif"

# Shape, line and style by kind of box. Styles with "filled" are filled with the dtype's color.
STYLES: dict[str, dict[str, str]] = {
    "op": {"shape": "box", "style": "filled,rounded"},
    "module": {"shape": "box", "style": "filled", "penwidth": "1.4"},
    "cast": {"shape": "hexagon", "style": "filled", "color": CAST, "penwidth": "2.2"},
    "kept": {"shape": "cylinder", "style": "filled", "color": KEPT, "penwidth": "2.2"},
    "ghost": {"shape": "hexagon", "style": "dashed", "color": FAINT, "fontcolor": FAINT},
    "opaque": {"shape": "octagon", "style": "filled", "penwidth": "2", "peripheries": "2"},
    "input": {"shape": "ellipse", "style": "filled"},
    "output": {"shape": "ellipse", "style": "filled", "penwidth": "2"},
    "outside": {"shape": "box", "style": "dashed,rounded", "color": FAINT, "fontcolor": "#666666"},
}


@dataclasses.dataclass(frozen=True)
class Page:
    """Title and settings of a picture.

    Attributes:
        title: Text above the picture.
        counts: Number of modules in each folded path.
        types: Classes of modules by path.
        has_legend: Whether the picture has a legend.
    """

    title: str
    counts: dict[str, int]
    types: dict[str, str]
    has_legend: bool = True


def to_dot(graphs: dict[str, BoxGraph], page: Page) -> graphviz.Digraph:
    """Returns a picture of graphs.

    Args:
        graphs: The graphs by title. A single graph has no frame.
        page: Title and settings.
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
    """Draws the boxes of a module, frames of the modules inside it, and the streams between them.

    A stream and its label are drawn in the innermost frame that contains all of its boxes.
    """
    frames = frames_in(boxes, streams, path)
    for name, box in boxes.items():
        if box.module == path:
            _draw_box(dot, names[name], box, page)
    for child, members in frames.items():
        if len(members) == 1:
            [(name, box)] = members.items()
            _draw_box(dot, names[name], _named_after(box, path, page), page)
            continue
        inside, streams = split(streams, members)
        with dot.subgraph(name=f"cluster_{prefix}{child}") as frame:
            _draw_title(frame, child, path, page, prefix)
            _draw_module(frame, members, inside, child, names, page, prefix)
    for stream in streams:
        _draw_stream(dot, stream, names)


def _draw_stream(dot: graphviz.Digraph, stream: Stream, names: dict[str, str]) -> None:
    """Draws arrows, with their label as a node without lines.

    Graphviz places nodes inside their frame, but may place edge labels across frames.
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
    """Adds the module's name to a box that is alone in its module, which has no frame."""
    name = box.module[len(path) + 1 if path else 0 :]
    if box.kind == "module":
        return dataclasses.replace(box, title=f"{name}.{box.title}", module=path)
    kind = page.types.get(box.module, "")
    return dataclasses.replace(box, lines=(*box.lines, f"{name}  {kind}" if kind else name))


def _draw_title(frame: graphviz.Digraph, child: str, path: str, page: Page, prefix: str) -> None:
    """Styles the frame of a module, and draws its title as a node without lines in the first row.

    Incoming arrows would cover the label of a frame.
    """
    name = child[len(path) + 1 if path else 0 :]
    kind = page.types.get(child, "")
    times = f"<B>  x{page.counts[child]}</B>" if child in page.counts else ""
    text = f"{html.escape(name)}{times}{f'  <I>{html.escape(kind)}</I>' if kind else ''}"
    tooltip = graphviz.escape(child)
    style = {"shape": "plain", "fontcolor": "#444444", "tooltip": tooltip}
    frame.node(f"title-{prefix}{child}", label=f"<{text}>", **style)
    folded = child in page.counts
    frame.attr(label="", tooltip=tooltip, style="rounded,filled" if folded else "rounded")
    frame.attr(color="#aaaaaa", fillcolor="#f7f7f2", penwidth="2" if folded else "1", margin="10")


def _draw_box(dot: graphviz.Digraph, name: str, box: Box, page: Page) -> None:
    style = dict(STYLES[box.kind])
    if "filled" in style["style"]:
        style["fillcolor"] = _fill(box)
        if box.kind == "module" and len(box.shares) > 1:
            style["style"] = "striped"
    lines = [f'<FONT POINT-SIZE="9">{html.escape(line)}</FONT>' for line in box.lines]
    above = ['<FONT POINT-SIZE="5"> </FONT>'] if box.kind == "kept" else []  # top of the cylinder
    label = "<BR/>".join([*above, f"<B>{html.escape(box.title)}{_times(box, page)}</B>", *lines])
    tooltip = graphviz.escape(box.tooltip).replace("\n", r"\n")
    dot.node(name, label=f"<{label}>", id=f"box-{name}", tooltip=tooltip, **style)


def _times(box: Box, page: Page) -> str:
    """Returns text such as ``x12`` for a closed box of twelve modules; ``""`` for one module."""
    path = f"{box.module}.{box.title}" if box.module else box.title
    return f"  x{page.counts[path]}" if box.kind == "module" and path in page.counts else ""


def _fill(box: Box) -> str:
    """Returns the color of the dtype; for modules, stripes in proportion to the dtypes."""
    if not box.shares:
        return "#ffffff"
    if box.kind != "module" or len(box.shares) == 1:
        return COLORS.get(box.shares[0][0], OTHER)
    total = sum(count for _, count in box.shares)
    parts = [f"{COLORS.get(d, OTHER)};{count / total:.3f}" for d, count in box.shares]
    parts[-1] = parts[-1].partition(";")[0]  # the last stripe fills the rest
    return ":".join(parts)


def _label(page: Page, graphs: dict[str, BoxGraph]) -> str:
    """Returns the title and the legend as a table."""
    title = f'<TR><TD COLSPAN="2" ALIGN="LEFT"><B>{html.escape(page.title)}</B></TD></TR>'
    if not page.has_legend:
        return f'<<TABLE BORDER="0">{title}</TABLE>>'
    boxes = [box for graph in graphs.values() for _, box in graph.nodes(data="box")]
    dtypes = [dtype for box in boxes for dtype, _ in box.shares]
    kinds = {box.kind for box in boxes}
    closed_lines = [line for box in boxes if box.kind == "module" for line in box.lines]
    if "kept" in kinds or not any(" kept" in line for line in closed_lines):
        kinds.discard("module")
    fills = _dtype_legend(dtypes)
    signs = [_sign(line, "ROUNDED", text) for k, (line, text) in LEGEND.items() if k in kinds]
    row = '<TABLE BORDER="0" CELLSPACING="3" CELLPADDING="2"><TR>{}</TR></TABLE>'
    tables = [row.format(content) for content in (fills, "".join(signs)) if content]
    rows = "".join(f'<TR><TD ALIGN="LEFT">{table}</TD></TR>' for table in tables)
    return f'<<TABLE BORDER="0" CELLSPACING="2">{title}{rows}</TABLE>>'


def _dtype_legend(dtypes: list[str]) -> str:
    colors = [d for d in COLORS if d in dtypes]
    others = ["other dtypes"] if any(d not in COLORS for d in dtypes) else []
    return "".join(_swatch(COLORS.get(d, OTHER), f"runs in {d}") for d in [*colors, *others])


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
    "opaque": (INK, "octagon: opaque node under native autocast"),
}
"""Line color and meaning of kinds of boxes with special shapes."""
