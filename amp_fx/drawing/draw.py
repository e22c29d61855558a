"""``amp_fx.draw``."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import graphviz  # type: ignore[import-untyped]
from torch.export import ExportedProgram

from amp_fx.drawing.boxes import levels, picture_of
from amp_fx.drawing.dot import to_dot
from amp_fx.drawing.folding import close_modules, fold_repeats, zoom
from amp_fx.drawing.page import page_of
from amp_fx.errors import OptionError, did_you_mean
from amp_fx.explanation.entry import explain_program
from amp_fx.explanation.explanation import Explanation
from amp_fx.explanation.network import graphs_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from amp_fx.drawing.boxes import Picture
    from amp_fx.explanation.records import GraphRecord

FORMATS = ("svg", "pdf", "png", "dot", "html")
"""Endings of files that ``draw`` writes."""

INSTALL_DOT = (
    "the 'dot' program of Graphviz is not installed: apt-get install graphviz, "
    "brew install graphviz, conda install graphviz, or https://graphviz.org/download"
)


@dataclasses.dataclass(eq=False, repr=False)
class Drawing:
    """A picture, which notebooks display.

    Attributes:
        explanation: The explanation that is drawn.
        pictures: The boxes and edges of its graphs, by title.
        title: The title of the whole.
        dpi: Dots per inch of a ``.png``.
    """

    explanation: Explanation
    pictures: dict[str, Picture]
    title: str
    dpi: int

    @functools.cached_property
    def _dot(self) -> graphviz.Digraph:
        return to_dot(self.pictures, self.title)

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

        Raises:
            OptionError: The format or folder does not exist, the folder is not writable, or the
                ``dot`` program is not installed.
        """
        target = Path(path)
        suffix = check_path(target)
        if suffix == "dot":
            content = self.source.encode("utf-8")
        elif suffix == "html":
            table = self.explanation._repr_html_()
            content = page_of(self.title, self.svg, table).encode("utf-8")
        else:
            content = self._render(suffix)
        try:
            target.write_bytes(content)
        except OSError as error:
            raise OptionError(f"cannot write {str(target)!r}: {error.strerror or error}") from error
        return target

    def _render(self, file_format: str) -> bytes:
        try:
            dot = self._dot.copy()
            if file_format == "png":
                dot.attr("graph", dpi=str(self.dpi))
            return bytes(dot.pipe(format=file_format))
        except graphviz.ExecutableNotFound as error:
            raise OptionError(INSTALL_DOT) from error

    def _repr_mimebundle_(self, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> Any:  # noqa: ARG002
        try:
            return {"image/svg+xml": self.svg, "text/plain": repr(self)}
        except OptionError as error:
            return {"text/plain": f"{self!r}\n{error}"}

    def __repr__(self) -> str:
        """Returns a summary in one line."""
        num_boxes = sum(len(picture.boxes) for picture in self.pictures.values())
        return f"<Drawing of {self.explanation.model}: {num_boxes} boxes>"


def draw(
    explanation: Explanation | ExportedProgram,
    path: str | os.PathLike[str] | None = None,
    *,
    depth: int | None = None,
    focus: str | None = None,
    graph: int | None = None,
    dpi: int = 192,
) -> Drawing:
    """Draws explained graphs with their casts, using Graphviz.

    The fill color of a box is the compute dtype. Casts are on the edges, and boxes count the cached
    casts of their weights. Frames are modules, and edges are labeled with dtypes and shapes. Equal
    consecutive modules of a list are one, with their number.

    Args:
        explanation: Result of ``amp_fx.explain``, or an exported program (``amp_fx.export``).
        path: File to write: ``.svg``, ``.pdf``, ``.png``, ``.dot``, or ``.html`` for a page with
            the picture and the table of the explanation. None writes no file.
        depth: Number of levels of modules to show; deeper ones are closed boxes. 0 draws one box,
            and a large number draws every op. Defaults to as many levels as are readable.
        focus: Path of the module to show with its inputs and outputs, such as ``"layers.3.attn"``.
        graph: Number of the graph to show; None shows all forward graphs.
        dpi: Dots per inch of a ``.png``.

    Returns:
        The picture.

    Raises:
        OptionError: The suffix or focus is unknown (the message suggests a similar name),
            ``depth`` is not a natural number, ``dpi`` is not an integer from 10 to 2400, the folder
            does not exist or is not writable, or ``dot`` is not installed.
    """
    if depth is not None and (not isinstance(depth, int) or depth < 0):
        raise OptionError(f"depth={depth!r} is neither None nor a number of levels, such as 2")
    if not isinstance(dpi, int) or not 10 <= dpi <= 2400:
        raise OptionError(f"dpi={dpi!r} is not an integer from 10 to 2400")
    if path is not None:
        check_path(path)
    if isinstance(explanation, ExportedProgram):
        explanation = explain_program(explanation)
    if not isinstance(explanation, Explanation):
        raise OptionError(
            "amp_fx.draw expects a result of amp_fx.explain or an exported program, got "
            f"{type(explanation).__name__}. For a model, write "
            "amp_fx.draw(amp_fx.explain(model)(*inputs))"
        )
    records = explanation.forward or explanation.graphs
    if graph is not None:
        records = tuple(graphs_of(explanation, graph))
    title = f"{explanation.model} on {explanation.device_type} {explanation.dtype}"
    title += f": {focus}" if focus else ""
    drawing = Drawing(explanation, _pictures(records, focus, depth), title, dpi)
    if path is not None:
        drawing.save(path)
    return drawing


def check_path(path: str | os.PathLike[str]) -> str:
    """Returns the format of a path's suffix.

    Raises:
        OptionError: The format or the folder does not exist.
    """
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix not in FORMATS or not Path(path).parent.is_dir():
        allowed = ", ".join(f".{name}" for name in FORMATS)
        raise OptionError(
            f"path={str(path)!r} must end in one of {allowed} and be in an existing folder"
        )
    return suffix


def _pictures(
    records: Iterable[GraphRecord], focus: str | None, depth: int | None
) -> dict[str, Picture]:
    """Returns pictures by title."""
    whole = {title_of(record): picture_of(record) for record in records}
    shown: dict[str, Picture | None] = dict(whole)
    if focus is not None:
        shown = {title: zoom(picture, focus) for title, picture in whole.items()}
    pictures = {
        title: close_modules(fold_repeats(picture), len(levels(focus or "")), depth)
        for title, picture in shown.items()
        if picture is not None
    }
    if not pictures:
        paths = {".".join(path) for picture in whole.values() for path in picture.types}
        raise OptionError(
            f"focus={focus!r} is not a module with ops in the graph{did_you_mean(focus, paths)}"
        )
    return pictures


def title_of(record: GraphRecord) -> str:
    """Returns the title of a graph, which is also its key in ``Drawing.pictures``."""
    after = f", then a graph break: {record.break_reason}" if record.break_reason else ""
    title = f"graph {record.index}{' backward' if record.stage == 'backward' else ''}{after}"
    return title if len(title) < 90 else f"{title[:87]}..."
