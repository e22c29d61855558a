"""The cases of ``tests/parity/models`` as programs for CUDA: regions and tensors name it."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.parity import cases, families, oracle
from tests.parity import models as folder

if TYPE_CHECKING:
    from tests.parity.cases import Case
    from tests.parity.oracle import Subject


@functools.cache
def cuda_cases() -> dict[str, Case]:
    """The cases, read from sources in which CUDA stands where the CPU stood."""
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
    name = f"tests.cuda.{path.stem}_on_cuda"
    module = sys.modules[name] = types.ModuleType(name)
    source = path.read_text().replace('"cpu"', '"cuda"')
    exec(compile(source, str(path), "exec"), vars(module))


def build(name: str) -> Subject:
    """A case's subject, made on the device."""
    torch.manual_seed(oracle.SEED)
    with torch.device("cuda"):
        subject = cuda_cases()[name].build()
    subject.device = "cuda"
    return subject
