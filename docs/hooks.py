"""Makes links of notebooks, which are to files, links to pages of the site; mends docstrings."""

from __future__ import annotations

import re
from typing import Any

PAGES = {"README.md": "../../", "CONTRIBUTING.md": "../../contributing/"}


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Rewrites links to notebooks and to files of the root, and ``::`` before code."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html.replace("::</p>", ":</p>")
    html = re.sub(r'href="(\d\d_\w+)\.ipynb"', r'href="../\1/"', html)
    return re.sub(
        r'href="\.\./(\w+\.md)"', lambda found: f'href="{PAGES.get(found[1], found[1])}"', html
    )
