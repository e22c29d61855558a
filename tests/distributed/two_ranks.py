"""The cases that run in two ranks, in one spawn."""

from __future__ import annotations

from tests.distributed import ddp_cases, fsdp_cases, scaler_cases, sharded_cases

CASES = (
    ddp_cases.inside,
    ddp_cases.outside,
    ddp_cases.options_of_ddp,
    ddp_cases.zero,
    ddp_cases.checkpointed,
    ddp_cases.local_sgd,
    ddp_cases.collectives,
    ddp_cases.saved,
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
