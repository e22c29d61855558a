"""Runs a module in several processes with gloo between them, and collects what they found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300  # seconds; a rank that waits for another for ever fails the tests


def run_ranks(module: str, folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    """What each rank found, by the name of the case."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(num_ranks), str(folder)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(printed)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def run_cases(cases: Sequence[Callable[[int], Any]]) -> None:
    """What a module that ``run_ranks`` runs does: all cases, in the same order in all ranks."""
    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    found = {}
    for case in cases:
        found[case.__name__] = case(rank)
        torch._dynamo.reset()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()
