"""What each of two processes does in test_agreement.py; run with rank and folder as arguments."""

from __future__ import annotations

import copy
import math
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import amp_fx

GRADS = [torch.arange(8.0).view(4, 2) + 1, torch.full((2,), 3.0)]


def make_params(*, is_spread: bool = False) -> list[torch.Tensor]:
    params = [torch.ones(4, 2), torch.ones(2)]
    if is_spread:
        mesh = init_device_mesh("cpu", (2,))
        params = [distribute_tensor(param, mesh, [Shard(0)]) for param in params]
    return [nn.Parameter(param) for param in params]


def set_grads(params: list[torch.Tensor], scale: torch.Tensor, bad: float | None) -> None:
    """`bad` goes into the caller's own part of the first gradient."""
    for param, full in zip(params, GRADS, strict=True):
        grad = full * scale
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = grad
    if bad is not None:
        part = params[0].grad.to_local() if isinstance(params[0].grad, DTensor) else params[0].grad
        assert part is not None
        part[0, 0] = bad


def full(tensors: Any) -> list[torch.Tensor]:
    return [
        (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for t in tensors
        if t is not None
    ]


def steps(scaler: Any, optimizer: Any, params: list[Any], rank: int, clip: float | None) -> Any:
    """Three steps of which rank 1 overflows in the second; all numbers after each."""
    numbers = []
    for number in range(3):
        scale = scaler.scale(torch.ones(()))
        set_grads(params, scale, math.inf if (number, rank) == (1, 1) else None)
        norm = None
        if clip is not None and isinstance(scaler, amp_fx.GradScaler):
            norm = scaler.unscale_and_clip_(optimizer, clip)
        elif clip is not None:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(params, clip)
        scaler.step(optimizer)
        scaler.update()
        numbers.append([*full([*params, norm]), torch.tensor(scaler.get_scale())])
    return numbers


def group(rank: int) -> Any:
    """Plain parameters, each process its own: only the flag is shared."""
    found: dict[Any, Any] = {}
    for name, options in (
        ("sgd", {}),
        ("adamw", {"fused": True}),
        ("adamw", {"fused": True, "clip": 1.0}),
        ("sgd", {"clip": 1.0}),
    ):
        clip = options.pop("clip", None)
        params = make_params()
        optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name](params, **options)
        scaler = amp_fx.GradScaler("cpu", growth_interval=1, process_group=dist.group.WORLD)
        found[name, clip] = steps(scaler, optimizer, params, rank, clip)
        found[name, clip, "skipped"] = [record.skipped for record in scaler.history()]
    return found


def without_gradients(rank: int) -> Any:
    """Rank 1 has no loss and no gradient, in the first iteration and ever."""
    found = []
    for call in ("step", "unscale_", "unscale_and_clip_", "fused", "compile_step"):
        params = make_params()
        optimizer = torch.optim.SGD(params, lr=1.0, fused=call == "fused")
        scaler = amp_fx.GradScaler("cpu", growth_interval=1, process_group=dist.group.WORLD)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = scaler.compile_step(optimizer, update_scale=False, backend="eager")
        for bad in (None, math.nan):
            if rank == 0:
                set_grads(params, scaler.scale(torch.ones(())), bad)
            if call == "unscale_":
                scaler.unscale_(optimizer)
            if call == "unscale_and_clip_":
                scaler.unscale_and_clip_(optimizer, 1.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step() if call == "compile_step" else scaler.step(optimizer)
            scaler.update()
            found.append((call, scaler.get_scale(), bool((params[0] == 1).all())))
    return found


def spread(rank: int) -> Any:
    """DTensor parameters, as tensor parallelism has them: ours, torch's, and one process alone."""
    found: dict[Any, Any] = {}
    for clip in (None, 0.5):
        for name, make in (("ours", amp_fx.GradScaler), ("torch", torch.amp.GradScaler)):
            params = make_params(is_spread=True)
            optimizer = torch.optim.AdamW(params, lr=0.1)
            found[name, clip] = steps(make("cpu", growth_interval=1), optimizer, params, rank, clip)
        params = make_params()
        scaler = torch.amp.GradScaler("cpu", growth_interval=1)
        # Alone, rank 0's part has to overflow as well: what is compared are finite steps.
        found["alone", clip] = steps(scaler, torch.optim.AdamW(params, lr=0.1), params, 1, clip)
    params = make_params(is_spread=True)
    scaler = amp_fx.GradScaler("cpu", process_group=dist.group.WORLD)
    set_grads(params, scaler.scale(torch.ones(())), math.nan if rank else None)
    scaler.step(torch.optim.SGD(params, lr=0.1))
    assert scaler.last_step is not None
    found["culprits"] = [(o.num_nan, o.numel) for o in scaler.last_step.overflows]
    return found


def wrapped(rank: int) -> Any:
    """DDP and FSDP2 models: ours and torch's."""
    found: dict[Any, Any] = {}
    for how in ("ddp", "fsdp"):
        for name in ("ours", "torch"):
            torch.manual_seed(0)
            model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            if how == "fsdp":
                fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            else:
                model = DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            scaler: Any
            if name == "ours":
                scaler = amp_fx.GradScaler("cpu", process_group=dist.group.WORLD)
            else:
                scaler = torch.amp.GradScaler("cpu")
            for number in range(4):
                inputs = torch.randn(
                    3, 4, generator=torch.Generator().manual_seed(10 * number + rank)
                )
                if (number, rank) == (1, 1):
                    inputs *= math.inf
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = model(inputs).float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            found[how, name] = [*full(model.parameters()), torch.tensor(scaler.get_scale())]
    return found


def copies(rank: int) -> Any:
    """A deep copy agrees with the same processes; a pickled one with none, and does not wait."""
    scaler = amp_fx.GradScaler("cpu", process_group=dist.group.WORLD)
    twin, alone = copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))
    found = []
    for each in (twin, alone):
        if each is alone and rank == 0:
            continue
        params = make_params()
        set_grads(params, each.scale(torch.ones(())), math.inf if rank == 1 else None)
        each.step(torch.optim.SGD(params, lr=1.0))
        each.update()
        found.append(each.get_scale())
    return found


def main(rank: int, folder: Path) -> None:
    """Run all cases, in the same order in both, and leave what they found in the folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    cases = (group, without_gradients, spread, wrapped, copies)
    found = {case.__name__: case(rank) for case in cases}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
