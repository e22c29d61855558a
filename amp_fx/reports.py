"""Shows reports as text, as HTML and as JSON, with tables that look alike."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.console import RenderableType

SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int64": "i64",
    "int32": "i32",
    "complex64": "c64",
}
"""Short names of dtypes, where room is scarce."""

STYLES = {"bfloat16": "green", "float16": "green", "float32": "yellow", "float64": "red"}
PIPED_WIDTH = 1000


class Report:
    """Data that is printed as a table; in a notebook, the table too."""

    def _render(self) -> RenderableType:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The report as dictionaries, lists, strings and numbers; the fields are the keys."""
        plain: dict[str, Any] = as_plain(self)
        return plain

    def to_json(self, indent: int | None = 2) -> str:
        """``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        """The table, as wide as the terminal."""
        return printed(self._render())

    def _repr_html_(self) -> str:
        return printed_html(self._render())


def as_plain(value: Any) -> Any:
    """A tree of records with only what JSON has: ``"nan"`` and ``"inf"`` are strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def printed(shown: RenderableType, width: int | None = None) -> str:
    """Returns what rich prints, as plain text.

    In a notebook rich would show it at once and, told by ``FORCE_COLOR``, set words in bold.

    Args:
        shown: What to print.
        width: Columns; None takes those of the terminal, or what it needs where there is none.
    """
    file = io.StringIO()
    width = piped_width() if width is None else width
    Console(file=file, width=width, force_terminal=False, force_jupyter=False).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def piped_width() -> int | None:
    """Columns for what no terminal shows: no line is folded, so that names can be searched for.

    None where a terminal, or ``COLUMNS``, says how many there are.
    """
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH


def printed_html(shown: RenderableType) -> str:
    """Returns what rich prints, as HTML."""
    console = Console(file=io.StringIO(), width=110, record=True, force_jupyter=False)
    console.print(shown)
    style = "font-family: monospace; font-size: 12px; line-height: 1.25"
    form = f'<pre style="{style}">{{code}}</pre>'
    return console.export_html(inline_styles=True, code_format=form)


def new_table(*names: str, folded: Collection[str] = (), right: Collection[str] = ()) -> Table:
    """An empty table.

    Args:
        names: Of its columns.
        folded: Those whose cells may take several lines.
        right: Those that are flush right.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        if name in folded:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


def dtype_cell(dtype: str) -> Text:
    """A dtype's short name, in its colour."""
    return Text(SHORT.get(dtype, dtype), style=STYLES.get(dtype, ""))


def times(number: int) -> str:
    """Returns ``x3`` for a row that stands for three equal things; an empty string for one."""
    return str(number) if number > 1 else ""


def human(number: float, unit: str = "B") -> str:
    """A number with a prefix: ``1.5 MB``, ``27 M``."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 1000:
            digits = f"{number:.0f}" if not prefix or number >= 100 else f"{number:.1f}"
            return f"{digits} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.1f} P{unit}"
