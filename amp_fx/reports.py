"""Base class of reports, and functions that render them as text, HTML and JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int64": "i64",
    "int32": "i32",
    "complex64": "c64",
}
"""Short names of dtypes for tables and pictures."""

COLORS = {"bfloat16": "#a6cee3", "float16": "#cab2d6", "float32": "#fdd9a0", "float64": "#f4a6a0"}
"""Colors of dtypes in pictures."""

OTHER_COLOR = "#e4e4e4"
"""Color of integers, booleans and other dtypes in pictures."""

STYLES = {"bfloat16": "green", "float16": "green", "float32": "yellow", "float64": "red"}
PIPED_WIDTH = 1000


class Report:
    """Data that prints as a table, also in notebooks."""

    computed: ClassVar[tuple[str, ...]] = ()
    """Names of properties that ``to_dict`` contains besides the fields."""
    omitted: ClassVar[tuple[str, ...]] = ()
    """Names of fields that ``to_dict`` does not contain."""

    def _render(self) -> RenderableType:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as dictionaries, lists, strings and numbers, by field name."""
        return _fields_of(self)

    def to_json(self, indent: int | None = 2) -> str:
        """Returns ``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        """Returns the table with the width of the terminal."""
        return printed(self._render())

    def __repr__(self) -> str:
        """Returns the first line of the table."""
        first, _, _ = printed(self._render(), PIPED_WIDTH).partition("\n")
        return f"<{type(self).__name__}: {first}>"

    def _repr_html_(self) -> str:
        return printed_html(self._render())


def as_plain(value: Any) -> Any:
    """Converts nested records to JSON types; NaN and infinity become strings.

    Dataclasses may have the class attributes ``computed`` and ``omitted`` of ``Report``.
    """
    if isinstance(value, Report):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return _fields_of(value)
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _fields_of(record: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(record)]
    names += getattr(record, "computed", ())
    omitted = getattr(record, "omitted", ())
    return {name: as_plain(getattr(record, name)) for name in names if name not in omitted}


def printed(content: RenderableType, width: int | None = None) -> str:
    """Renders content as plain text, for notebooks and ``FORCE_COLOR`` as well.

    Args:
        content: The content.
        width: Number of columns. Defaults to that of the terminal; without a terminal, lines are
            not folded.
    """
    from rich.console import Console

    file = io.StringIO()
    width = piped_width() if width is None else width
    Console(file=file, width=width, force_terminal=False, force_jupyter=False).print(content)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def piped_width() -> int | None:
    """Returns a width that folds no lines, so that names can be searched for in piped output.

    Returns None if a terminal or ``COLUMNS`` determines the width.
    """
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH


def printed_html(content: RenderableType) -> str:
    """Renders content as HTML."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=110, record=True, force_jupyter=False)
    console.print(content)
    style = "font-family: monospace; font-size: 12px; line-height: 1.25"
    code_format = f'<pre style="{style}">{{code}}</pre>'
    return console.export_html(inline_styles=True, code_format=code_format)


def stacked(*parts: RenderableType) -> RenderableType:
    """Returns parts one below the other."""
    from rich.console import Group

    return Group(*map(_unmarked, parts))


def _unmarked(part: RenderableType) -> RenderableType:
    """Returns text in which brackets are no markup, as in a line of code."""
    from rich.text import Text

    return Text(part) if isinstance(part, str) else part


def new_table(
    *names: str,
    rows: Iterable[Sequence[str | Text]] = (),
    folded: Collection[str] = (),
    right: Collection[str] = (),
) -> Table:
    """Creates a table.

    Args:
        names: Names of the columns.
        rows: The cells of each row.
        folded: Names of columns whose cells may have several lines.
        right: Names of right-aligned columns.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        if name in folded:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(_unmarked, row))
    return table


def dtype_cell(dtype: str) -> Text:
    """Returns the short name of a dtype in its color."""
    from rich.text import Text

    return Text(SHORT.get(dtype, dtype), style=STYLES.get(dtype, ""))


def first_of(items: Sequence[str], most: int) -> list[str]:
    """Returns the first items, and how many others there are."""
    others = len(items) - most
    return [*items[:most], *([f"{others} more"] if others > 0 else [])]


def times(number: int) -> str:
    """Returns the count of a row that represents several equal items; an empty string for one."""
    return str(number) if number > 1 else ""


def human(number: float, unit: str = "B") -> str:
    """Returns a number with a unit prefix, such as ``1.5 MB`` or ``27 M``."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 1000:
            digits = f"{number:.0f}" if not prefix or number >= 100 else f"{number:.1f}"
            return f"{digits} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.1f} P{unit}"
