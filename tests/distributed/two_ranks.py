"""Program of each of the two ranks of the tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.distributed import ddp_cases, fsdp_cases, scaler_cases, sharded_cases
from tests.distributed.spawn import run_cases


def saved(rank: int) -> Any:
    return ddp_cases.saved(rank, str(Path(sys.argv[3]) / "checkpoint"))


CASES = (
    ddp_cases.inside,
    ddp_cases.outside,
    ddp_cases.options_of_ddp,
    ddp_cases.zero,
    ddp_cases.checkpointed,
    ddp_cases.local_sgd,
    ddp_cases.collectives,
    saved,
    ddp_cases.pipeline,
    sharded_cases.fsdp2,
    sharded_cases.replicated,
    sharded_cases.fsdp1,
    sharded_cases.watched_first,
    sharded_cases.shared_code,
    sharded_cases.arguments,
    sharded_cases.deepspeed,
    sharded_cases.frozen,
    sharded_cases.tensor_parallel,
    sharded_cases.stand_in,
    scaler_cases.scaler,
    fsdp_cases.gathered_low,
    fsdp_cases.sharded_already,
)

if __name__ == "__main__":
    run_cases(CASES)
