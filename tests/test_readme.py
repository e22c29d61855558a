"""What README.md shows, run as it is shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"(?ms)^```python\n(.*?)^```", TEXT)


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_examples_run_in_order(tmp_path: Path) -> None:
    """In a process of their own, which has not imported amp_fx."""
    command = [sys.executable, "-c", "".join(EXAMPLES)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", TEXT))
def test_links_lead_somewhere(link: str) -> None:
    assert (README.parent / link).exists()
