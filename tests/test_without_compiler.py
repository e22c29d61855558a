"""What needs no C++ compiler works in an environment that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from amp_fx.tables import DEVICES
from tests.snippets import ROOT, fenced

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BACKEND = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1))
compiled = torch.compile(model, backend="amp_fx")
for _ in range(2):
    y = compiled(torch.ones(2, 8, requires_grad=True))
    y.sum().backward()
    with torch.no_grad():
        compiled(torch.ones(3, 8))
assert y.dtype == torch.float32
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python with an empty ``PATH`` and empty caches, so that no library is built already."""
    empty = tmp_path / "bin"
    empty.mkdir()
    names = ("AMP_FX_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "HOME")
    environment = {name: str(tmp_path / name) for name in names}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {
        "PATH": str(empty),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return run


def test_the_section_of_the_readme(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    [code] = [text for text in fenced(ROOT / "README.md", "python") if "amp_fx.audit(" in text]
    assert all(f"amp_fx.{name}(" in code for name in ("GradScaler", "export"))
    done = run("-c", f"{code}\nassert 'aten._to_copy' in program.graph_module.code or "
               "'aten.to' in program.graph_module.code, program.graph_module.code")  # fmt: skip
    assert "products" in done.stdout
    assert "| gradients | float32 |" in done.stdout  # the Markdown
    assert "True (Overflow(name='weight'" in done.stdout
    assert "compiler" not in done.stderr


def test_lists_as_data(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    data = json.loads(run("-m", "amp_fx", "policy", "--json").stdout)
    assert data["ops"]["aten::matmul"]["cuda"] == "lower_precision_fp"
    assert {device for row in data["ops"].values() for device in row} == set(DEVICES)


def test_the_backend_says_what_is_missing_in_one_line(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    lines = [line for line in run("-c", BACKEND).stderr.splitlines() if "compiler" in line]
    assert len(lines) == 1
    assert "no C++ compiler found" in lines[0]
    assert "amp_fx.audit" in lines[0]
