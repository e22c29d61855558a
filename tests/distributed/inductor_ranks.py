"""Program of each of the two ranks of the tests with inductor, which take minutes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed import fsdp_cases, scaler_cases
from tests.distributed.nets import as_it_is, autocast, compiled, make_net, train
from tests.distributed.spawn import run_cases


def fsdp2(compile_: Any) -> Any:
    model = make_net()
    for block in model.blocks:
        if compile_ is not as_it_is:
            block.forward = compile_(block.forward)
        fully_shard(block)
    return fully_shard(model)


WRAPPERS = {
    "ddp": lambda compile_: DistributedDataParallel(compile_(make_net())),
    "fsdp2": fsdp2,
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
            model: Any = wrap(compile_)  # type: ignore[no-untyped-call]
            found[name][which] = train(model, rank, context=autocast)
    return found


if __name__ == "__main__":
    run_cases((inductor,))
