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

from amp_fx.drawing.boxes import picture_of
from amp_fx.drawing.dot import Page, to_dot
from amp_fx.drawing.folding import close_modules, fold_repeats, unknown_focus, zoom
from amp_fx.drawing.page import page_of
from amp_fx.errors import OptionError
from amp_fx.explanation.entry import explain_program
from amp_fx.explanation.explanation import Explanation
from amp_fx.explanation.network import _graphs_of
from amp_fx.explanation.reading import read_graph
from amp_fx.explanation.records import GraphRecord
from amp_fx.regions.state import AutocastState

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from amp_fx.drawing.boxes import Picture

FORMATS = ("svg", "pdf", "png", "dot", "html")
"""Endings of files that ``draw`` writes."""

INSTALL_DOT = (
    "the 'dot' program of Graphviz is not installed: apt-get install graphviz, "
    "brew install graphviz, conda install graphviz, or https://graphviz.org/download"
)


@dataclasses.dataclass(frozen=True)
class View:
    """Settings of ``draw``."""

    depth: int | None = None
    focus: str | None = None
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
        self.pictures, types, counts = _pictures(self.records, self.view)
        stage = ", as captured" if self.view.before else ""
        title = self.title + stage + (f": {self.view.focus}" if self.view.focus else "")
        self._dot = to_dot(self.pictures, Page(title, types, counts, self.view.has_legend))

    @property
    def title(self) -> str:
        """The model, its device type and dtype."""
        explanation = self.explanation
        return f"{explanation.model} on {explanation.device_type} {explanation.dtype}"

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
        if suffix == "html":
            table = self.explanation._repr_html_()
            return _write(target, page_of(self.title, self.svg, table).encode("utf-8"))
        content = self._render(suffix)
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

    def __repr__(self) -> str:
        """Returns a summary in one line."""
        num_boxes = sum(len(picture.boxes) for picture in self.pictures.values())
        return f"<Drawing of {self.explanation.model}: {num_boxes} boxes>"


def draw(
    explanation_or_graph: Explanation | GraphRecord | ExportedProgram | fx.GraphModule | fx.Graph,
    path: str | os.PathLike[str] | None = None,
    *,
    depth: int | None = None,
    focus: str | None = None,
    graph: int | None = None,
    before: bool = False,
    legend: bool = True,
    dpi: int = 192,
) -> Drawing:
    """Draws explained graphs with their casts, using Graphviz.

    The fill color of a box is the compute dtype. Casts are on the edges, and boxes count the cached
    casts of their weights. Frames are modules, and edges are labeled with dtypes and shapes. Equal
    consecutive modules of a list are one, with their number.

    Args:
        explanation_or_graph: Result of ``amp_fx.explain`` or one of its graphs, an exported
            program (``amp_fx.export``), or an FX graph.
        path: File to write: ``.svg``, ``.pdf``, ``.png``, ``.dot``, or ``.html`` for a page with
            the picture and the table of the explanation. None writes no file.
        depth: Number of levels of modules to show; deeper ones are closed boxes. 0 draws one box,
            and a large number draws every op. Defaults to as many levels as are readable.
        focus: Path of the module to show with its inputs and outputs, such as ``"layers.3.attn"``.
        graph: Number of the graph to show; None shows all forward graphs.
        before: Whether to show the captured graph, without casts.
        legend: Whether to explain colors and shapes above the picture.
        dpi: Dots per inch of a ``.png``.

    Returns:
        The picture.

    Raises:
        OptionError: The suffix or focus is unknown (the message suggests similar names),
            ``depth`` is not a natural number, ``dpi`` is not an integer from 10 to 2400, the folder
            does not exist or is not writable, or ``dot`` is not installed.
    """
    if depth is not None and (not isinstance(depth, int) or depth < 0):
        raise OptionError(f"depth={depth!r} is neither None nor a number of levels, such as 2")
    if not isinstance(dpi, int) or not 10 <= dpi <= 2400:
        raise OptionError(f"dpi={dpi!r} is not an integer from 10 to 2400")
    if path is not None:
        check_path(path)
    explanation = _as_explanation(explanation_or_graph)
    records = explanation.forward or explanation.graphs
    if graph is not None:
        records = tuple(_graphs_of(explanation, graph))
    view = View(depth, focus, before, legend, dpi)
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
        return _of_record(read_graph(source, AutocastState.ambient()), type(source).__name__)
    if isinstance(source, fx.Graph):
        module = fx.GraphModule(source.owning_module or {}, source)
        return _of_record(read_graph(module, AutocastState.ambient()), "graph")
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


def _pictures(
    records: tuple[GraphRecord, ...], view: View
) -> tuple[dict[str, Picture], dict[str, str], dict[str, int]]:
    """Returns pictures by title, the classes of modules and the numbers of folded modules."""
    types: dict[str, str] = {}
    counts: dict[str, int] = {}
    whole = {title_of(record): picture_of(record, before=view.before) for record in records}
    shown = whole
    if view.focus is not None:
        zoomed = {title: zoom(picture, view.focus) for title, picture in whole.items()}
        shown = {title: picture for title, picture in zoomed.items() if picture is not None}
        if not shown:
            raise unknown_focus(whole.values(), view.focus)
    for record in records:
        types |= dict(record.modules)
    pictures = {}
    for title, picture in shown.items():
        folded, repeats = fold_repeats(picture)
        counts |= repeats
        pictures[title] = close_modules(folded, types, repeats, view.focus or "", view.depth)
    return pictures, types, counts


def title_of(record: GraphRecord) -> str:
    """Returns the title of a graph, which is also its key in ``Drawing.boxes``."""
    after = f", then a graph break: {record.break_reason}" if record.break_reason else ""
    title = f"graph {record.index}{' backward' if record.stage == 'backward' else ''}{after}"
    return title if len(title) < 90 else f"{title[:87]}..."
