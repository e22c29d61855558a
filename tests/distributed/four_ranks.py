"""Program of each of four ranks, which combine two ways to distribute a model."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.distributed.nets import OPTIONS, as_it_is, compare, make_net
from tests.distributed.spawn import run_cases


def sharded(compile_: Any, *, tensor_parallel: bool) -> Any:
    """HSDP, or FSDP2 of a tensor parallel model, block by block."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = make_net()
    for block in model.blocks:
        if tensor_parallel:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["inner"], plan)
        if compile_ is not as_it_is:
            block.compile(backend="amp_fx", options=OPTIONS)
        fully_shard(block, mesh=mesh["outer"] if tensor_parallel else mesh)
    return model


def hybrid(rank: int) -> Any:
    return compare(lambda c: sharded(c, tensor_parallel=False), rank)


def both(rank: int) -> Any:
    """The batch is one for those that share a layer."""
    return compare(lambda c: sharded(c, tensor_parallel=True), rank // 2)


if __name__ == "__main__":
    run_cases((hybrid, both))
