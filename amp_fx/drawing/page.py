"""HTML page of a drawing: the picture, and the table of its explanation."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_fx.drawing.draw import Drawing

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>body {{ font-family: sans-serif }} section {{ overflow: auto }}</style>
</head>
<body>
<h1>{title}</h1>
<section>{svg}</section>
<section>{table}</section>
</body>
</html>
"""


def page_of(drawing: Drawing) -> str:
    """Returns a static page, which needs no other file and no network.

    Raises:
        OptionError: The ``dot`` program is not installed.
    """
    explanation = drawing.explanation
    title = f"{explanation.model} on {explanation.device_type} {explanation.dtype}"
    svg = drawing.svg
    return _PAGE.format(
        title=html.escape(title),
        svg=svg[svg.index("<svg") :],  # without the XML declaration
        table=explanation._repr_html_(),
    )
