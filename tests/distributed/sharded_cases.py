"""Weights that a library shards: nothing of them may be kept."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import amp_fx
from amp_fx.weights.watch import engine
from tests.distributed import fsdp_cases, scaler_cases
from tests.distributed.nets import OPTIONS, Net, as_it_is, compare, compiled, make_net, train


def by_block(compile_: Any, shard: Any) -> Any:
    """Each block compiled, then sharded; then the rest sharded."""
    model = make_net()
    for block in model.blocks:
        if compile_ is not as_it_is:
            block.compile(backend="amp_fx", options=OPTIONS)
        shard(block)
    shard(model)
    return model


def in_two_dimensions(compile_: Any, *, is_tensor_parallel: bool) -> Any:
    """HSDP, or FSDP2 of a tensor parallel model, on four ranks, block by block."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = make_net()
    if is_tensor_parallel:
        scaler_cases.tensor_parallel(model, mesh["inner"])
    for block in model.blocks:
        if compile_ is not as_it_is:
            block.compile(backend="amp_fx", options=OPTIONS)
        fully_shard(block, mesh=mesh["outer"] if is_tensor_parallel else mesh)
    return model


def hybrid(rank: int) -> Any:
    return compare(lambda c: in_two_dimensions(c, is_tensor_parallel=False), rank)


def both(rank: int) -> Any:
    """The batch is one for those that share a layer."""
    return compare(lambda c: in_two_dimensions(c, is_tensor_parallel=True), rank // 2)


def fsdp2(rank: int) -> Any:
    return compare(lambda c: by_block(c, fully_shard), rank)


def replicated(rank: int) -> Any:
    """DDP made of FSDP2's parts, which leaves no mark on modules."""
    return compare(lambda c: by_block(c, replicate), rank)


def fsdp1(rank: int) -> Any:
    cpu = torch.device("cpu")
    return compare(
        lambda c: FullyShardedDataParallel(c(make_net()), device_id=cpu, use_orig_params=True), rank
    )


def watched_first(rank: int) -> Any:
    """Two forwards and backwards before the model is sharded."""
    amp_fx.weight_cache.clear()
    found: dict[str, Any] = {}
    for name in ("eager", "ours"):
        model = make_net()
        for block in model.blocks:
            if name == "ours":
                block.compile(backend="amp_fx", options=OPTIONS)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.ones(4, 16)).sum().backward()
        found["before"] = amp_fx.weight_cache.stats().entries
        model.zero_grad()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        found[name] = train(model, rank)
    found["kept"] = amp_fx.weight_cache.stats().entries
    return found


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = Net()
        self.sharded = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) + self.sharded(x)  # type: ignore[no-any-return]


def shared_code(rank: int) -> Any:
    """Blocks of one class, some of them in a part that is sharded: they share compiled code."""

    def wrap(compile_: Any) -> Any:
        torch.manual_seed(0)
        model = Twins()
        for net in (model.plain, model.sharded):
            for block in net.blocks:
                if compile_ is not as_it_is:
                    block.compile(backend="amp_fx", options=OPTIONS)
        fully_shard(model.sharded)
        return model

    return compare(wrap, rank)


def arguments(rank: int) -> Any:  # noqa: ARG001
    """Counts the cache entries of a weight that is an argument of a compiled function."""
    amp_fx.weight_cache.clear()
    weight = nn.Parameter(torch.ones(8, 16))
    function = compiled(nn.functional.linear)
    for _ in range(2):
        function(torch.ones(4, 16), weight)
    return amp_fx.weight_cache.stats().entries


def deepspeed(rank: int) -> Any:  # noqa: ARG001
    """Counts the cache entries of parameters with DeepSpeed's ``ds_id``, which are partitioned."""
    amp_fx.weight_cache.clear()
    model = nn.Linear(16, 8)
    for number, weight in enumerate(model.parameters()):
        weight.ds_id = number  # type: ignore[attr-defined]
    ours = compiled(model)
    for _ in range(2):
        ours(torch.ones(4, 16))
    return amp_fx.weight_cache.stats().entries


def tensor_parallel(rank: int) -> Any:
    """DTensor weights: of each a copy of this process's part is kept."""
    found = compare(lambda c: c(scaler_cases.tensor_parallel(make_net())), rank)
    amp_fx.weight_cache.clear()
    model = scaler_cases.tensor_parallel(make_net())
    ours = compiled(model)
    x = torch.ones(4, 16)
    writes: dict[str, Any] = {
        "in place": lambda p: p.mul_(1.5),
        "data": lambda p: p.data.mul_(1.5),
        "list": lambda p: torch._foreach_mul_([p], 1.5),
        "part": lambda p: p.to_local().mul_(1.5),
        "none": lambda p: p,
        "asked for": amp_fx.weight_cache.invalidate,
    }
    weights = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
    for name, write in writes.items():
        with torch.no_grad():
            ours(x)
            before = amp_fx.weight_cache.stats().refreshes
            for weight in weights:
                write(weight)
            with torch.autocast("cpu", torch.bfloat16):
                same = torch.equal(ours(x), model(x).float())
        found[name] = same, amp_fx.weight_cache.stats().refreshes - before
    return found


def stand_in(rank: int) -> Any:  # noqa: ARG001
    """Marks a DTensor as an accelerator's list ops do, which invalidates the cast of its shard."""
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    part = weight._local_tensor
    watch = engine()
    watch.watch(part)
    kept = watch.CacheSlot((part,), False)
    watch.start((kept,), ((part,),))
    watch.finish((kept,), (part.bfloat16(),))
    watch.share_record(weight, part)
    before = kept.is_fresh((part,))
    watch.mark([weight])
    return before, kept.is_fresh((part,))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


def frozen(rank: int) -> Any:  # noqa: ARG001
    """Inference with inductor, which freezes weights: of a plain layer, and of a sharded one."""
    found = {}
    for name in ("plain", "sharded"):
        amp_fx.weight_cache.clear()
        torch._dynamo.reset()
        model = nn.Sequential(Layer())
        model[0].compile(backend="amp_fx")
        if name == "sharded":
            fully_shard(model)
        with torch.no_grad():
            for _ in range(2):
                model(torch.ones(4, 16))
        stats = amp_fx.weight_cache.stats()
        found[name] = len(stats.values), stats.entries
    return found


def with_compiled_forwards(compile_: Any) -> Any:
    model = make_net()
    for block in model.blocks:
        if compile_ is not as_it_is:
            block.forward = compile_(block.forward)
        fully_shard(block)
    return fully_shard(model)


WRAPPERS: dict[str, Any] = {
    "ddp": lambda compile_: DistributedDataParallel(compile_(make_net())),
    "fsdp2": with_compiled_forwards,
    "simple": fsdp_cases.simple,
    "tensor parallel": lambda compile_: compile_(scaler_cases.tensor_parallel(make_net())),
}
COMPILERS = {
    "eager": as_it_is,
    "native": functools.partial(torch.compile, backend="inductor"),
    "ours": lambda model: compiled(model, "inductor"),
}


def inductor(rank: int) -> Any:
    """Returns all losses, by wrapper and by what compiles."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, wrap in WRAPPERS.items():
        found[name] = {}
        for which, compile_ in COMPILERS.items():
            torch._dynamo.reset()
            found[name][which] = train(wrap(compile_), rank)
    return found
