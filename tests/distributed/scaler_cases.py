"""``GradScaler`` that nobody told of other processes: one rank overflows in the second update.

All ranks see the same batches, so that each wrapper trains what one process trains alone.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import amp_fx
from tests.distributed.ddp_cases import Half
from tests.distributed.nets import batch, make_net

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_UPDATES = 4
BAD_UPDATE = 1
MAX_NORM = 0.5


def tensor_parallel(model: Any) -> Any:
    """Each block's layers by columns, then by rows; the rest is on all ranks."""
    mesh = init_device_mesh("cpu", (2,))
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


def step_compiled(scaler: Any, optimizer: Any) -> Any:
    compiled = scaler.compile_step(optimizer, max_norm=MAX_NORM, backend="aot_eager")

    def step() -> Any:
        compiled()
        return compiled.norm

    return step


def overflow(params: list[Any]) -> None:
    """In this rank's own part of the first gradient."""
    grad = next(param.grad for param in params if param.grad is not None)
    part = grad.to_local() if isinstance(grad, DTensor) else grad
    part.view(-1)[0] = math.inf


def updates(params: list[Any], backward: Any, make_step: Any, *, overflows: bool) -> dict[str, Any]:
    """What each update did: the norm and the scale; and the parameters in the end."""
    # Adam's would make much of what little the order of a sum does to gradients near zero.
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    scaler = amp_fx.GradScaler("cpu")
    step = make_step(scaler, optimizer)
    norms, scales = [], []
    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        backward(scaler, update)
        if update == BAD_UPDATE and overflows:
            overflow(params)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="steps of")  # "run eagerly"
            norms.append(float(step()))
        scales.append(scaler.get_scale())
    skipped = [record.skipped for record in scaler.history()]
    return {"norms": norms, "scales": scales, "skipped": skipped}


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


def in_pipeline(make_step: Any, rank: int) -> dict[str, Any]:
    """Two stages; the loss is on the last, and only there is anything scaled."""
    torch._dynamo.reset()
    model = Half(make_net(), rank)
    scalers: list[Any] = []

    def loss(output: torch.Tensor, y: torch.Tensor) -> Any:
        return scalers[0].scale(nn.functional.mse_loss(output, y))

    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule: Any = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss)

    def backward(scaler: Any, update: int) -> None:
        scalers[:] = [scaler]
        x, y = batch(update, 0, 0)
        schedule.step(x) if rank == 0 else schedule.step(target=y)

    found = updates(list(model.parameters()), backward, make_step, overflows=rank == 1)
    return {**found, "params": full(model.parameters())}


def scaler(rank: int) -> Any:
    found: dict[str, Any] = {}
    for name, make_step in (("eager", step_eagerly), ("compiled", step_compiled)):
        # Alone, and after DDP, a compiled step is one call as it is without other processes.
        wrappers = WRAPPERS if name == "eager" else ("fsdp2", "tensor parallel")
        found[name] = {how: wrapped(how, make_step, rank) for how in wrappers}
        found[name]["pipeline"] = in_pipeline(make_step, rank)
    return found
