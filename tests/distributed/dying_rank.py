"""Two processes, of which one dies before it steps; the other has to be told."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from amp_fx import GradScaler
from tests.distributed.nets import batch, make_net
from tests.distributed.scaler_cases import sharded
from tests.distributed.spawn import run_cases


def step_alone(rank: int) -> Any:
    model = sharded(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    x, y = batch(0, 0, 0)
    scaler.scale((model(x) - y).square().mean()).backward()
    dist.barrier()
    if rank == 1:
        os._exit(0)  # as if killed, but for what it tells the one who waits for it
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        print(f"step raised {error}")  # noqa: T201
        os._exit(3)
    return None


if __name__ == "__main__":
    run_cases((step_alone,))
