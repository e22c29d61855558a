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
from amp_fx.drawing.heat import levels_of
from amp_fx.errors import OptionError
from amp_fx.explanation.entry import explain_program
from amp_fx.explanation.explanation import Explanation
from amp_fx.explanation.network import _graphs_of
from amp_fx.explanation.recorder import as_record
from amp_fx.explanation.records import GraphRecord
from amp_fx.numerics.report import MEASURES, AccuracyReport, as_explanation, origins_of

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
    """The part of a graph that ``draw`` shows, and in which detail.

    Attributes:
        most: How many boxes a picture of modules may have before no more are opened.
    """

    level: str | None = None
    focus: str | None = None
    ghosts: bool = False
    fold: bool = True
    before: bool = False
    has_legend: bool = True
    color: str = "dtype"
    dpi: int = 192
    most: int = MOST_BOXES


@dataclasses.dataclass(eq=False, repr=False)
class Drawing:
    """A picture; in a notebook it shows itself."""

    explanation: Explanation
    records: tuple[GraphRecord, ...]
    view: View
    report: AccuracyReport | None = None

    def __post_init__(self) -> None:
        """Makes the picture."""
        self._dot, self.boxes = _picture(self.explanation, self.records, self.view, self.report)

    def with_view(self, view: View) -> Drawing:
        """Returns a drawing of the same graph with other settings."""
        return dataclasses.replace(self, view=view)

    @property
    def source(self) -> str:
        """The picture in the language of Graphviz."""
        return str(self._dot.source)

    @functools.cached_property
    def svg(self) -> str:
        """The picture as SVG.

        Raises:
            OptionError: The ``dot`` program is not installed.
        """
        return self._render("svg").decode("utf-8")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the picture; the ending says in which format.

        If the ``dot`` program is missing, the browser lays out an ``.html`` page. For the other
        formats, the ``.dot`` file is written beside.

        Raises:
            OptionError: There is no such format or folder, the folder cannot be written to, or
                the ``dot`` program is missing.
        """
        target = Path(path)
        ending = check_path(target)
        if ending == "dot":
            return _write(target, self.source.encode("utf-8"))
        if ending == "html":
            from amp_fx.drawing.page import page_of

            return _write(target, page_of(self).encode("utf-8"))
        if not shutil.which("dot"):
            beside = _write(target.with_suffix(".dot"), self.source.encode("utf-8"))
            raise OptionError(f"{INSTALL_DOT}; wrote {beside} instead")
        return _write(target, self._render(ending))

    def _render(self, form: str) -> bytes:
        try:
            dot = self._dot.copy()
            if form == "png":
                dot.attr("graph", dpi=str(self.view.dpi))
            return bytes(dot.pipe(format=form))
        except graphviz.ExecutableNotFound as error:
            raise OptionError(INSTALL_DOT) from error

    def _repr_mimebundle_(self, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> Any:  # noqa: ARG002
        if not shutil.which("dot"):
            return {"text/plain": f"{self!r}\n{INSTALL_DOT}"}
        return {"image/svg+xml": self.svg, "text/plain": repr(self)}

    def _repr_svg_(self) -> str | None:
        return self.svg if shutil.which("dot") else None

    def __repr__(self) -> str:
        """One line."""
        num_boxes = sum(len(graph) for graph in self.boxes.values())
        return f"<Drawing of {self.explanation.model}: {num_boxes} boxes>"


def draw(
    explanation_or_graph: Explanation
    | GraphRecord
    | AccuracyReport
    | ExportedProgram
    | fx.GraphModule
    | fx.Graph,
    path: str | os.PathLike[str] | None = None,
    *,
    level: str | None = None,
    focus: str | None = None,
    graph: int | None = None,
    ghosts: bool = False,
    fold: bool = True,
    before: bool = False,
    legend: bool = True,
    color: str | None = None,
    dpi: int = 192,
) -> Drawing:
    """Draws explained graphs with the casts that were inserted, through Graphviz.

    Boxes are filled with the colour of the dtype that they run in; casts are hexagons, casts
    of weights that are kept are cylinders; edges tell dtype and shape; frames are modules.

    Args:
        explanation_or_graph: What ``amp_fx.explain`` gave, one of its graphs, what
            ``amp_fx.accuracy`` gave, an exported program (``amp_fx.export``), or an FX graph.
        path: Where to write it: ``.svg``, ``.pdf``, ``.png``, ``.dot``, or ``.html`` for a
            page that needs neither a network nor the ``dot`` program, to open modules, pan, zoom
            and search in. None writes nothing.
        level: ``"op"`` draws every op, ``"module"`` closes modules so that the picture
            stays small. None takes ``"op"`` where that is small too.
        focus: Path of the module to show, with what it takes and gives: ``"layers.3.attn"``.
        graph: Only the graphs of this number; None takes all forward graphs.
        ghosts: Whether casts that were removed again are shown.
        fold: Whether repeated modules of a list are folded into one with a count.
        before: Whether the graph is shown as captured, without casts.
        legend: Whether colours and shapes are explained above the picture.
        color: What boxes are coloured by. A report of ``amp_fx.accuracy`` has ``"effect"`` (what
            errors do to the loss; the default there), ``"error"`` (that since the start) and
            ``"headroom"`` (how near values come to the dtype's limit) besides ``"dtype"``; ops in
            which something overflows get a dashed line. The page has a switch for it.
        dpi: Dots per inch of a ``.png``.

    Returns:
        The picture.

    Raises:
        OptionError: The level, the ending or the focus is unknown (with similar names), ``dpi`` is
            no whole number from 10 to 2400, the folder is missing or cannot be written to, or
            ``dot`` is not installed.
    """
    if level is not None and level not in LEVELS:
        raise OptionError(f"level={level!r} is not one of {', '.join(map(repr, LEVELS))}")
    if not isinstance(dpi, int) or not 10 <= dpi <= 2400:
        raise OptionError(f"dpi={dpi!r} is not a whole number from 10 to 2400")
    if path is not None:
        check_path(path)
    report = explanation_or_graph if isinstance(explanation_or_graph, AccuracyReport) else None
    color = _checked_color(color, report)
    explanation = _as_explanation(explanation_or_graph)
    records = explanation.forward or explanation.graphs
    if graph is not None:
        records = tuple(_graphs_of(explanation, graph))
    view = View(level, focus, ghosts, fold, before, legend, color, dpi)
    drawing = Drawing(explanation, tuple(records), view, report)
    if path is not None:
        drawing.save(path)
    return drawing


def _checked_color(color: str | None, report: AccuracyReport | None) -> str:
    if color is None:
        return "dtype" if report is None else MEASURES[0]
    allowed = ("dtype",) if report is None else ("dtype", *MEASURES)
    if color not in allowed:
        of = "" if report is not None else " (others are for what amp_fx.accuracy gives)"
        raise OptionError(f"color={color!r} is not one of {', '.join(map(repr, allowed))}{of}")
    return color


def _as_explanation(given: Any) -> Explanation:
    if isinstance(given, AccuracyReport):
        return as_explanation(given)
    if isinstance(given, Explanation):
        return given
    if isinstance(given, ExportedProgram):
        return explain_program(given)
    if isinstance(given, fx.GraphModule):
        return _of_record(as_record(given), type(given).__name__)
    if isinstance(given, fx.Graph):
        owner = given.owning_module
        return _of_record(as_record(fx.GraphModule(owner or {}, given)), "graph")
    if isinstance(given, GraphRecord):
        return _of_record(given, f"graph {given.index}")
    raise OptionError(
        f"amp_fx.draw takes the result of amp_fx.explain, one of its graphs, an exported program "
        f"or an FX graph, not {type(given).__name__}; for a model: "
        "amp_fx.draw(amp_fx.explain(model)(*inputs))"
    )


def _of_record(record: GraphRecord, name: str) -> Explanation:
    device_type, _, dtype = (record.autocast[0] if record.autocast else "").partition(" ")
    return Explanation(name, "", dtype, device_type, False, (record,))


def check_path(path: str | os.PathLike[str]) -> str:
    """The format that a path's ending names.

    Raises:
        OptionError: There is no such format, or no such folder.
    """
    path = Path(path)
    ending = path.suffix.removeprefix(".").lower()
    if ending not in FORMATS:
        allowed = ", ".join(f".{name}" for name in FORMATS)
        raise OptionError(
            f"path={str(path)!r}: no format has the ending {path.suffix!r}; {allowed}"
        )
    if not path.parent.is_dir():
        raise OptionError(f"path={str(path)!r}: there is no folder {str(path.parent)!r}")
    return ending


def _write(path: Path, content: bytes) -> Path:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OptionError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    return path


def _picture(
    explanation: Explanation,
    records: tuple[GraphRecord, ...],
    view: View,
    report: AccuracyReport | None,
) -> tuple[graphviz.Digraph, dict[str, BoxGraph]]:
    counts: dict[str, int] = {}
    types: dict[str, str] = {}
    graphs: dict[str, BoxGraph] = {}
    wanted = [title_of(record) for record in records]
    made = [boxes_of(r, ghosts=view.ghosts, before=view.before) for r in records]
    if view.focus is not None:
        made, wanted = _zoomed(made, wanted, view.focus)
    for record in records:
        types |= dict(record.modules)
    for title, graph in zip(wanted, made, strict=True):
        folded, found = fold_repeats(graph) if view.fold else (graph, {})
        counts |= found
        types |= _types_of_folded(found, types)
        level = view.level or ("op" if len(folded) <= MOST_BOXES else "module")
        root = view.focus or ""
        graphs[title] = (
            collapse_modules(folded, types, root, view.most, found) if level == "module" else folded
        )
    stage = ", as captured" if view.before else ""
    title = f"{explanation.model} on {explanation.device_type} {explanation.dtype}{stage}"
    title += f": {view.focus}" if view.focus else ""
    page = Page(title, counts, types, view.has_legend)
    if report is not None:
        levels = None if view.color == "dtype" else levels_of(report, view.color)
        outlined = origins_of(report)
        page = dataclasses.replace(page, levels=levels, outlined=outlined, measure=view.color)
    return to_dot(graphs, page), graphs


def _zoomed(
    graphs: list[BoxGraph], titles: list[str], focus: str
) -> tuple[list[BoxGraph], list[str]]:
    """The graphs in which the module is."""
    found = [pair for pair in zip(graphs, titles, strict=True) if has_module(pair[0], focus)]
    if not found:
        raise OptionError(unknown_focus(graphs, focus))
    return [zoom(graph, focus) for graph, _ in found], [title for _, title in found]


def title_of(record: GraphRecord) -> str:
    """Returns the title of a graph, in ``Drawing.boxes`` too."""
    after = f", then a graph break: {record.break_reason}" if record.break_reason else ""
    title = f"graph {record.index}{' backward' if record.stage == 'backward' else ''}{after}"
    return title if len(title) < 90 else f"{title[:87]}..."


def _types_of_folded(counts: dict[str, int], types: dict[str, str]) -> dict[str, str]:
    """Classes of modules by their paths with folded numbers in them."""
    found = {}
    for folded in counts:
        original = first_of_folded(folded)
        for path, kind in types.items():
            if is_inside(path, original):
                found[folded + path[len(original) :]] = kind
    return found
