"""Runs a module in several processes with gloo between them, and collects what they found."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable, "-X", "faulthandler")
TIMEOUT = 700  # seconds; a rank that waits for another for ever fails the tests


def run_ranks(module: str, folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    """Runs a module in several ranks; returns the results of each rank by the name of the case."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outputs = [folder / f"{rank}.txt" for rank in range(num_ranks)]
    with contextlib.ExitStack() as stack:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-X",
                    "faulthandler",
                    "-m",
                    module,
                    str(rank),
                    str(num_ranks),
                    str(folder),
                ],
                cwd=ROOT,
                env=env,
                stdout=stack.enter_context(output.open("w")),
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        wait_for(processes)
    printed = [output.read_text() for output in outputs]
    assert not any(process.returncode for process in processes), "\n".join(printed)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def wait_for(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended; those that have not in time are killed."""
    until = time.monotonic() + TIMEOUT
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    for process in processes:
        process.kill()
        process.wait()


def run_cases(cases: Sequence[Callable[[int], Any]]) -> None:
    """Runs all cases in the same order in all ranks, in a module that ``run_ranks`` starts."""
    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    found = {}
    for case in cases:
        print(case.__name__, flush=True)  # noqa: T201 - where it stands if it does not end
        found[case.__name__] = case(rank)
        torch._dynamo.reset()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()
