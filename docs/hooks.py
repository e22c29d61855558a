"""Makes links of notebooks, which are to files, links to pages of the site; mends docstrings.

It also gives the pictures of notebooks a text: the heading that they are under.
"""

from __future__ import annotations

import re
from typing import Any

PAGES = {"README.md": "../../", "CONTRIBUTING.md": "../../contributing/"}


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Rewrites links to notebooks and to files of the root, and ``::`` before code."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html.replace("::</p>", ":</p>")
    html = re.sub(r'href="(\d\d_\w+)\.ipynb"', r'href="../\1/"', html)
    html = re.sub(r'href="\.\./docs/([\w/-]+)\.md"', r'href="../../\1/"', html)
    html = re.sub(
        r'href="\.\./(\w+\.md)"', lambda found: f'href="{PAGES.get(found[1], found[1])}"', html
    )
    return with_texts(html)


NO_TEXT = "No description has been provided for this image"
"""What nbconvert says of each picture."""


def with_texts(html: str) -> str:
    """Returns a page whose pictures have the heading before them as their text."""
    parts = re.split(r"(<h\d[^>]*>.*?</h\d>)", html, flags=re.DOTALL)
    heading, written = "", []
    for part in parts:
        if re.match(r"<h\d", part):
            heading = re.sub(r"<[^>]*>|¶", "", part).strip()
        written.append(part.replace(NO_TEXT, f"Picture: {heading}"))
    return "".join(written)
