"""Compiled models in ``DistributedDataParallel`` and related wrappers."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx import stats
from amp_fx.replaced import replaced
from tests.distributed.nets import (
    Net,
    as_it_is,
    autocast,
    batch,
    compare,
    compiled,
    make_net,
    train,
)

bare = contextlib.nullcontext


def small_buckets() -> Any:
    """Makes ``DDPOptimizer`` split even a small model into several parts."""
    return replaced((dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1024))


def wrap(compile_: Any, **options: Any) -> Any:
    return DistributedDataParallel(compile_(make_net()), **options)


def inside(rank: int) -> Any:
    """``DDP(torch.compile(model))``, gradients summed every time and once per update."""
    return {
        "each": compare(wrap, rank),
        "no_sync": compare(wrap, rank, context=bare, without_sync=lambda m: m.no_sync()),
    }


def outside(rank: int) -> Any:
    """``torch.compile(DistributedDataParallel(model))``, in one part and in several."""

    def wrap_first(c: Any) -> Any:
        return c(DistributedDataParallel(make_net(), bucket_cap_mb=0.005))

    def no_sync(model: Any) -> Any:
        return getattr(model, "_orig_mod", model).no_sync()

    found = {}
    with small_buckets():
        before = stats.snapshot()["graphs"]
        found["parts"] = compare(wrap_first, rank, without_sync=no_sync)
        found["parts"]["graphs"] = stats.snapshot()["graphs"] - before
        with torch._dynamo.config.patch(optimize_ddp=False):
            found["whole"] = compare(wrap_first, rank, without_sync=no_sync, context=bare)
    return found


def options_of_ddp(rank: int) -> Any:
    found = {}
    for name, options in {
        "static": {"static_graph": True, "gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
    }.items():
        found[name] = compare(functools.partial(wrap, **options), rank)
    return found


def zero(rank: int) -> Any:
    """Each rank updates a part of the weights, which lie in buckets, and sends it to the others."""

    def make_optimizer(model: nn.Module) -> Any:
        return ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=1e-2,
        )

    return compare(wrap, rank, make_optimizer=make_optimizer)


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: torch.Tensor = self.last(x)
        return out


def checkpointed(rank: int) -> Any:
    def wrap_own(compile_: Any) -> Any:
        torch.manual_seed(0)
        return DistributedDataParallel(compile_(Checkpointed()))

    return compare(wrap_own, rank)


def local_sgd(rank: int) -> Any:
    """Every rank on its own, and now and then all take the mean of their weights."""
    found: dict[str, Any] = {}
    for name, compile_ in (("eager", as_it_is), ("ours", compiled)):
        amp_fx.weight_cache.clear()
        model = compile_(make_net())

        def average(model: nn.Module = model) -> None:
            for weight in model.parameters():
                dist.all_reduce(weight.data)
                weight.data.div_(2)

        found[name] = train(model, rank, after_update=average)
        kept = amp_fx.weight_cache.stats()
        found["kept"], found["made"] = kept.entries, kept.refreshes
    return found


def collectives(rank: int) -> Any:
    """Collectives straight into the weights: what the model says after each, and the refreshes."""
    world: Any = dist.group.WORLD
    writes: dict[str, Any] = {
        "all_reduce": dist.all_reduce,
        "broadcast": lambda p: dist.broadcast(p, src=1),
        "async": lambda p: dist.broadcast(p, src=0, async_op=True).wait(),
        "gather": lambda p: dist.all_gather_into_tensor(p, p[: len(p) // 2] + 0.5 * rank),
        "coalesced": lambda p: torch._C._distributed_c10d._broadcast_coalesced(world, [p], 1024, 1),
        "point to point": lambda p: dist.send(p, 1) if rank == 0 else dist.recv(p, 0),
    }
    found: dict[str, Any] = {}
    x = batch(0, 0, 0)[0]
    model = make_net()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(rank)
        ours = compiled(model)
        ours(x)
        for name, write in writes.items():
            before = amp_fx.weight_cache.stats().refreshes
            for weight in model.parameters():
                write(weight.data)
            with autocast():
                same = torch.equal(ours(x), model(x).float())
            found[name] = same, amp_fx.weight_cache.stats().refreshes - before
    return found


def saved(rank: int) -> Any:
    """A checkpoint of a compiled model goes into an eager one, and back into it after training."""
    folder = str(Path(sys.argv[3]) / "checkpoint")
    model = DistributedDataParallel(compiled(make_net()))
    x = batch(0, 0, 0)[0]
    with torch.no_grad(), autocast():
        before = model(x)
    save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    train(model, rank)
    eager = DistributedDataParallel(Net())
    found = []
    for target in (eager, model):
        state = {"model": get_model_state_dict(target)}
        load(state, checkpoint_id=folder)
        set_model_state_dict(target, state["model"])
        with torch.no_grad(), autocast():
            found.append(torch.equal(target(x).float(), before.float()))
    return found


class Half(nn.Module):
    """One of two pipeline stages."""

    def __init__(self, net: Net, rank: int) -> None:
        super().__init__()
        self.first = net.first if rank == 0 else nn.Identity()
        self.blocks = net.blocks[:1] if rank == 0 else net.blocks[1:]
        self.last = nn.Identity() if rank == 0 else net.last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        # What a stage sends has the dtype of what it was first asked for.
        out: torch.Tensor = self.last(x).float()
        return out


def pipeline(rank: int) -> Any:
    """Two stages, four micro-batches under way at once."""
    found: dict[str, Any] = {}
    x, y = batch(0, 0, 0)
    for name, compile_ in (("eager", as_it_is), ("ours", compiled)):
        amp_fx.weight_cache.clear()
        model = compile_(Half(make_net(), rank))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule: Any = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        found[name] = []
        for _ in range(3):
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            with autocast():
                schedule.step(x) if rank == 0 else schedule.step(target=y, losses=losses)
            optimizer.step()
            found[name] += [loss.item() for loss in losses]
        kept = amp_fx.weight_cache.stats()
        found["kept"], found["made"] = kept.entries, kept.refreshes
    return found
