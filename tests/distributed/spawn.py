"""Runs functions in several processes with gloo between them, and collects what they found."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 700  # seconds; a rank that waits for another for ever fails the tests


def run_ranks(module: str, folder: Path, num_ranks: int, *cases: str) -> list[dict[str, Any]]:
    """Runs functions of a module in several ranks, which get their rank.

    Args:
        module: The module.
        folder: Where ranks store what they found, and meet.
        num_ranks: The number of processes.
        *cases: The names of the functions; the module's ``CASES`` if there are none.

    Returns:
        For each rank, the results by the name of the function.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outputs = [folder / f"{rank}.txt" for rank in range(num_ranks)]
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.distributed.spawn"]
    with contextlib.ExitStack() as stack:
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(num_ranks), str(folder), module, *cases],
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


def main() -> None:
    """Runs the functions in the same order in all ranks."""
    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    module = importlib.import_module(sys.argv[4])
    cases = [getattr(module, name) for name in sys.argv[5:]] or module.CASES
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


if __name__ == "__main__":
    main()
