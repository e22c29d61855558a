"""HTML page of a drawing: the picture, and the table of its explanation."""

from __future__ import annotations

import html

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


def page_of(title: str, svg: str, table: str) -> str:
    """Returns a static page, which needs no other file and no network.

    Args:
        title: The title.
        svg: The picture.
        table: The table as HTML.
    """
    picture = svg[svg.index("<svg") :]  # without the XML declaration
    return _PAGE.format(title=html.escape(title), svg=picture, table=table)
