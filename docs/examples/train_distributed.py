"""Trains a small model over several processes, and compares its losses with eager autocast.

    torchrun --nproc_per_node 2 train_distributed.py --wrapper fsdp2

It uses NCCL where every process finds a GPU, else gloo and the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amp_fx

if TYPE_CHECKING:
    from collections.abc import Iterable

OPTIONS = {"compiler": "aot_eager", "dtype": torch.bfloat16}


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to [batch, width]."""
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


def wrapped(wrapper: str, model: nn.Sequential, *, compiles: bool) -> nn.Module:
    """The model in one of the wrappers."""
    device = next(model.parameters()).device
    if wrapper == "fsdp2":
        policy = {}
        if compiles:
            explanation = amp_fx.explain(model)(torch.empty(4, model[0].in_features, device=device))
            with contextlib.suppress(amp_fx.errors.UnsupportedError):  # before torch 2.15
                policy = {"mp_policy": amp_fx.fsdp_policy(model, explanation)}
        for part in model:
            if compiles:
                part.compile(backend="amp_fx", options=OPTIONS)
            fully_shard(part, **policy)
        return fully_shard(model, **policy)
    if wrapper == "tensor-parallel":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model[1:-1]:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if compiles:
        model.compile(backend="amp_fx", options=OPTIONS)
    is_replicated = wrapper in ("ddp", "zero")
    return nn.parallel.DistributedDataParallel(model) if is_replicated else model


def num_bytes(values: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors on this rank."""
    local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    return sum(value.nbytes for value in local)


def train(
    args: argparse.Namespace, device: torch.device, *, compiles: bool
) -> tuple[list[float], str]:
    """The losses of this process, and what it stores."""
    torch.manual_seed(0)
    torch.compiler.reset()
    blocks = [Block(args.width) for _ in range(3)]
    model = nn.Sequential(nn.Linear(16, args.width), *blocks, nn.Linear(args.width, 8)).to(device)
    model = wrapped(args.wrapper, model, compiles=compiles)
    if args.wrapper == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank = 0 if args.wrapper == "tensor-parallel" else dist.get_rank()  # which share batches
    losses = []
    for step in range(args.steps):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        x, y = x.to(device), (x[:, :8] * x[:, 8:]).sin().to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    own = optimizer.optim if args.wrapper == "zero" else optimizer
    states = [value for state in own.state.values() for value in state.values()]
    kilobytes = [num_bytes(values) // 1000 for values in (model.parameters(), states)]
    return losses, "{} kB of parameters, {} kB of optimizer states".format(*kilobytes)


def main() -> None:
    """Trains twice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--wrapper", choices=("ddp", "zero", "fsdp2", "tensor-parallel"), default="ddp"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() > rank
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    backend = "nccl" if has_gpus else "gloo"
    if "RANK" in os.environ:  # torchrun started several processes
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    expected, _ = train(args, device, compiles=False)
    losses, stored = train(args, device, compiles=True)
    if dist.get_rank() == 0:
        print(f"{args.wrapper}: last loss {losses[-1]:.6f}, eager autocast {expected[-1]:.6f}")
        print(f"on rank 0: {stored}")
    dist.destroy_process_group()
    assert losses == expected, (losses, expected)


if __name__ == "__main__":
    main()
