"""``GradScaler`` without settings for other ranks: one rank overflows in the second update.

All ranks see the same batches, so that each wrapper trains what one process trains alone.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import amp_fx
from tests.distributed.nets import batch, make_net

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_UPDATES = 4
BAD_UPDATE = 1
MAX_NORM = 0.5


def tensor_parallel(model: Any, mesh: Any = None) -> Any:
    """Each block's layers by columns, then by rows; the rest is on all ranks."""
    mesh = mesh or init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sharded(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp2": sharded,
    "tensor parallel": tensor_parallel,
}


def step_eagerly(scaler: Any, optimizer: Any) -> Any:
    def step() -> Any:
        norm = scaler.unscale_and_clip_(optimizer, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        return norm

    return step


def step_by_torch(scaler: Any, optimizer: Any) -> Any:
    def step() -> Any:
        scaler.unscale_(optimizer)
        params = optimizer.param_groups[0]["params"]
        norm = nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    return step


def overflow(params: list[Any]) -> None:
    """In this rank's own part of the first gradient."""
    grad = next(param.grad for param in params if param.grad is not None)
    part = grad.to_local() if isinstance(grad, DTensor) else grad
    part.view(-1)[0] = math.inf


def updates(params: list[Any], backward: Any, make_step: Any, *, overflows: bool) -> dict[str, Any]:
    """Returns the norm, the scale and the number of local overflows of each update."""
    # Adam's would make much of what little the order of a sum does to gradients near zero.
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    kind: Any = (torch.amp if make_step is step_by_torch else amp_fx).GradScaler
    scaler = kind("cpu")
    step = make_step(scaler, optimizer)
    norms, scales, culprits = [], [], []
    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        backward(scaler, update)
        if update == BAD_UPDATE and overflows:
            overflow(params)
        norms.append(float(step()))
        scales.append(scaler.get_scale())
        report = getattr(scaler, "last_step", None)
        culprits.append(len(report.overflows) if report else 0)
    return {"norms": norms, "scales": scales, "culprits": culprits}


def full(params: Any) -> list[torch.Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in params]


def wrapped(how: str, make_step: Any, rank: int) -> dict[str, Any]:
    torch._dynamo.reset()
    model = WRAPPERS[how](make_net())

    def backward(scaler: Any, update: int) -> None:
        x, y = batch(update, 0, 0)
        if how == "ddp" and (update, rank) == (BAD_UPDATE, 1):
            x = x * math.inf  # gradients are the same on all ranks: it has to come from within
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()

    overflows = how == "alone" or (rank == 1 and how != "ddp")
    found = updates(list(model.parameters()), backward, make_step, overflows=overflows)
    return {**found, "params": full(model.parameters())}


STEPS = {"eager": step_eagerly, "torch": step_by_torch}


def scaler(rank: int) -> Any:
    return {
        name: {how: wrapped(how, make_step, rank) for how in WRAPPERS if (name, how) not in REFUSED}
        for name, make_step in STEPS.items()
    }


REFUSED = {("torch", "tensor parallel")}
"""torch's scaler does not take DTensors next to plain tensors."""


def step_alone(rank: int) -> Any:
    """One of two processes dies before it steps; the other has to be told."""
    model = sharded(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp_fx.GradScaler("cpu")
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
