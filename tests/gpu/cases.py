"""The cases of ``tests/parity/models`` as programs whose regions and tensors name CUDA."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

from tests.parity import cases, families
from tests.parity import models as folder

if TYPE_CHECKING:
    from tests.parity.cases import Case


@functools.cache
def cuda_cases() -> dict[str, Case]:
    """Returns the cases, from sources in which ``"cuda"`` replaces ``"cpu"``."""
    kept = dict(families.CASES)
    cases.CASES.clear()
    try:
        for path in sorted(Path(next(iter(folder.__path__))).glob("*.py")):
            _run_for_cuda(path)
        return dict(cases.CASES)
    finally:
        cases.CASES.clear()
        cases.CASES.update(kept)


def _run_for_cuda(path: Path) -> None:
    name = f"tests.gpu.{path.stem}_on_cuda"
    module = sys.modules[name] = types.ModuleType(name)
    source = path.read_text().replace('"cpu"', '"cuda"')
    exec(compile(source, str(path), "exec"), vars(module))
