"""The README of the package index: links to files lead to ``Source`` of ``[project.urls]``."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def readme() -> str:
    """README.md, with absolute links if the project has an address."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    source = re.search(r'(?m)^Source = "(.+?)/?"$', project)
    if source is None:
        return text
    to_file = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
    kinds = {"!": "raw", "": "blob"}
    return to_file.sub(
        lambda link: f"{link[1]}[{link[2]}]({source[1]}/{kinds[link[1]]}/main/{link[3]})", text
    )


setup(long_description=readme(), long_description_content_type="text/markdown")
