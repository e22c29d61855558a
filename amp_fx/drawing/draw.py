"""``amp_fx.draw``."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import graphviz  # type: ignore[import-untyped]
from torch import fx
from torch.export import ExportedProgram

from amp_fx.drawing.boxes import boxes_of
from amp_fx.drawing.dot import Page, to_dot
from amp_fx.drawing.folding import (
    MOST_BOXES,
    collapse_modules,
    first_of_folded,
    fold_repeats,
    has_module,
    is_inside,
    unknown_focus,
    zoom,
)
from amp_fx.drawing.page import page_of
from amp_fx.errors import OptionError
from amp_fx.explanation.entry import explain_program
from amp_fx.explanation.explanation import Explanation
from amp_fx.explanation.network import _graphs_of
from amp_fx.explanation.recorder import as_record
from amp_fx.explanation.records import GraphRecord

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from amp_fx.drawing.boxes import BoxGraph

FORMATS = ("svg", "pdf", "png", "dot", "html")
"""Endings of files that ``draw`` writes."""

LEVELS = ("op", "module")

INSTALL_DOT = (
    "the 'dot' program of Graphviz is not installed: apt-get install graphviz, "
    "brew install graphviz, conda install graphviz, or https://graphviz.org/download"
)


@dataclasses.dataclass(frozen=True)
class View:
    """Settings of ``draw``."""

    level: str | None = None
    focus: str | None = None
    ghosts: bool = False
    fold: bool = True
    before: bool = False
    has_legend: bool = True
    dpi: int = 192


@dataclasses.dataclass(eq=False, repr=False)
class Drawing:
    """A picture, which notebooks display."""

    explanation: Explanation
    records: tuple[GraphRecord, ...]
    view: View

    def __post_init__(self) -> None:
        """Creates the picture."""
        self._dot, self.boxes = _picture(self.explanation, self.records, self.view)

    @property
    def source(self) -> str:
        """The picture in the DOT language of Graphviz."""
        return str(self._dot.source)

    @functools.cached_property
    def svg(self) -> str:
        """The picture as SVG.

        Raises:
            OptionError: The ``dot`` program is not installed.
        """
        return self._render("svg").decode("utf-8")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the picture to a file, in the format of its suffix.

        If the ``dot`` program is not installed, a ``.dot`` file is written instead.

        Raises:
            OptionError: The format or folder does not exist, the folder is not writable, or the
                ``dot`` program is not installed.
        """
        target = Path(path)
        suffix = check_path(target)
        if suffix == "dot":
            return _write(target, self.source.encode("utf-8"))
        if not shutil.which("dot"):
            dot_file = _write(target.with_suffix(".dot"), self.source.encode("utf-8"))
            raise OptionError(f"{INSTALL_DOT}; wrote {dot_file} instead")
        content = page_of(self).encode("utf-8") if suffix == "html" else self._render(suffix)
        return _write(target, content)

    def _render(self, file_format: str) -> bytes:
        try:
            dot = self._dot.copy()
            if file_format == "png":
                dot.attr("graph", dpi=str(self.view.dpi))
            return bytes(dot.pipe(format=file_format))
        except graphviz.ExecutableNotFound as error:
            raise OptionError(INSTALL_DOT) from error

    def _repr_mimebundle_(self, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> Any:  # noqa: ARG002
        if not shutil.which("dot"):
            return {"text/plain": f"{self!r}\n{INSTALL_DOT}"}
        return {"image/svg+xml": self.svg, "text/plain": repr(self)}

    def _repr_svg_(self) -> str | None:
        return self.svg if shutil.which("dot") else None

    def __repr__(self) -> str:
        """Returns a summary in one line."""
        num_boxes = sum(len(graph) for graph in self.boxes.values())
        return f"<Drawing of {self.explanation.model}: {num_boxes} boxes>"


def draw(
    explanation_or_graph: Explanation | GraphRecord | ExportedProgram | fx.GraphModule | fx.Graph,
    path: str | os.PathLike[str] | None = None,
    *,
    level: str | None = None,
    focus: str | None = None,
    graph: int | None = None,
    ghosts: bool = False,
    fold: bool = True,
    before: bool = False,
    legend: bool = True,
    dpi: int = 192,
) -> Drawing:
    """Draws explained graphs with their casts, using Graphviz.

    The fill color of a box is the compute dtype. Casts are hexagons, cached casts of weights are
    cylinders, frames are modules, and edges are labeled with dtypes and shapes.

    Args:
        explanation_or_graph: Result of ``amp_fx.explain`` or one of its graphs, an exported
            program (``amp_fx.export``), or an FX graph.
        path: File to write: ``.svg``, ``.pdf``, ``.png``, ``.dot``, or ``.html`` for a page with
            the picture and the table of the explanation. None writes no file.
        level: ``"op"`` draws every op; ``"module"`` closes modules to reduce the number of boxes.
            Defaults to ``"op"`` if the picture is small.
        focus: Path of the module to show with its inputs and outputs, such as ``"layers.3.attn"``.
        graph: Number of the graph to show; None shows all forward graphs.
        ghosts: Whether removed casts are shown.
        fold: Whether repeated modules of a list are folded into one with a count.
        before: Whether to show the captured graph, without casts.
        legend: Whether to explain colors and shapes above the picture.
        dpi: Dots per inch of a ``.png``.

    Returns:
        The picture.

    Raises:
        OptionError: The level, suffix or focus is unknown (the message suggests similar names),
            ``dpi`` is not an integer from 10 to 2400, the folder does not exist or is not writable,
            or ``dot`` is not installed.
    """
    if level is not None and level not in LEVELS:
        raise OptionError(f"level={level!r} is not one of {', '.join(map(repr, LEVELS))}")
    if not isinstance(dpi, int) or not 10 <= dpi <= 2400:
        raise OptionError(f"dpi={dpi!r} is not an integer from 10 to 2400")
    if path is not None:
        check_path(path)
    explanation = _as_explanation(explanation_or_graph)
    records = explanation.forward or explanation.graphs
    if graph is not None:
        records = tuple(_graphs_of(explanation, graph))
    view = View(level, focus, ghosts, fold, before, legend, dpi)
    drawing = Drawing(explanation, tuple(records), view)
    if path is not None:
        drawing.save(path)
    return drawing


def _as_explanation(source: Any) -> Explanation:
    if isinstance(source, Explanation):
        return source
    if isinstance(source, ExportedProgram):
        return explain_program(source)
    if isinstance(source, fx.GraphModule):
        return _of_record(as_record(source), type(source).__name__)
    if isinstance(source, fx.Graph):
        owner = source.owning_module
        return _of_record(as_record(fx.GraphModule(owner or {}, source)), "graph")
    if isinstance(source, GraphRecord):
        return _of_record(source, f"graph {source.index}")
    raise OptionError(
        f"amp_fx.draw expects a result of amp_fx.explain, one of its graphs, an exported program "
        f"or an FX graph, got {type(source).__name__}. For a model, write "
        "amp_fx.draw(amp_fx.explain(model)(*inputs))"
    )


def _of_record(record: GraphRecord, name: str) -> Explanation:
    device_type, _, dtype = (record.autocast[0] if record.autocast else "").partition(" ")
    return Explanation(name, "", dtype, device_type, False, (record,))


def check_path(path: str | os.PathLike[str]) -> str:
    """Returns the format of a path's suffix.

    Raises:
        OptionError: The format or the folder does not exist.
    """
    path = Path(path)
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        allowed = ", ".join(f".{name}" for name in FORMATS)
        raise OptionError(f"path={str(path)!r}: the suffix {path.suffix!r} is not one of {allowed}")
    if not path.parent.is_dir():
        raise OptionError(f"path={str(path)!r}: the folder {str(path.parent)!r} does not exist")
    return suffix


def _write(path: Path, content: bytes) -> Path:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OptionError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    return path


def _picture(
    explanation: Explanation, records: tuple[GraphRecord, ...], view: View
) -> tuple[graphviz.Digraph, dict[str, BoxGraph]]:
    counts: dict[str, int] = {}
    types: dict[str, str] = {}
    graphs: dict[str, BoxGraph] = {}
    titles = [title_of(record) for record in records]
    box_graphs = [boxes_of(r, ghosts=view.ghosts, before=view.before) for r in records]
    if view.focus is not None:
        box_graphs, titles = _zoomed(box_graphs, titles, view.focus)
    for record in records:
        types |= dict(record.modules)
    for title, graph in zip(titles, box_graphs, strict=True):
        folded, repeats = fold_repeats(graph) if view.fold else (graph, {})
        counts |= repeats
        types |= _types_of_folded(repeats, types)
        level = view.level or ("op" if len(folded) <= MOST_BOXES else "module")
        if level == "module":
            folded = collapse_modules(folded, types, view.focus or "", MOST_BOXES, repeats)
        graphs[title] = folded
    stage = ", as captured" if view.before else ""
    title = f"{explanation.model} on {explanation.device_type} {explanation.dtype}{stage}"
    title += f": {view.focus}" if view.focus else ""
    page = Page(title, counts, types, view.has_legend)
    return to_dot(graphs, page), graphs


def _zoomed(
    graphs: list[BoxGraph], titles: list[str], focus: str
) -> tuple[list[BoxGraph], list[str]]:
    """Returns the graphs that contain a module, zoomed to the module, and their titles."""
    pairs = [pair for pair in zip(graphs, titles, strict=True) if has_module(pair[0], focus)]
    if not pairs:
        raise OptionError(unknown_focus(graphs, focus))
    return [zoom(graph, focus) for graph, _ in pairs], [title for _, title in pairs]


def title_of(record: GraphRecord) -> str:
    """Returns the title of a graph, which is also its key in ``Drawing.boxes``."""
    after = f", then a graph break: {record.break_reason}" if record.break_reason else ""
    title = f"graph {record.index}{' backward' if record.stage == 'backward' else ''}{after}"
    return title if len(title) < 90 else f"{title[:87]}..."


def _types_of_folded(counts: dict[str, int], types: dict[str, str]) -> dict[str, str]:
    """Returns the classes of modules inside folded paths."""
    folded_types = {}
    for folded in counts:
        original = first_of_folded(folded)
        for path, kind in types.items():
            if is_inside(path, original):
                folded_types[folded + path[len(original) :]] = kind
    return folded_types
