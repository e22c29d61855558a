"""Program of each of the two ranks of ``test_collectives.py``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812, torch's own spelling
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import amp_fx

BFLOAT16 = torch.bfloat16


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def audited(model: Any, rank: int, *, warms: bool = False, **region: Any) -> dict[str, Any]:
    """Audits one step; whether it left the weights as they were."""
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(4, 16, generator=generator), torch.randint(16, (4,), generator=generator)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", **region):
            loss = F.cross_entropy(model(x).float(), y)
        torch.autograd.backward(loss)  # here
        optimizer.step()
        return loss

    if warms:
        step()
    before = [local(parameter).detach().clone() for parameter in model.parameters()]
    report = amp_fx.audit(step)()
    after = [local(parameter).detach().clone() for parameter in model.parameters()]
    losses = [report.loss, float(step().detach())]
    return {
        "found": [(f.kind, f.code, f.message) for f in report.findings],
        "collectives": {use.dtype for use in report.uses if use.what == "collectives"},
        "is_same": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "losses": losses,
    }


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def ddp(rank: int) -> Any:
    return audited(DistributedDataParallel(net()), rank)


def ddp_compressed(rank: int) -> Any:
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, fp16_compress_hook)
    return audited(model, rank)


def sharded(rank: int, policy: MixedPrecisionPolicy, *, warms: bool) -> Any:
    model = net()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return audited(model, rank, warms=warms, enabled=False)


def fsdp2(rank: int) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=torch.float32)
    return [sharded(rank, policy, warms=warms) for warms in (False, True)]


def fsdp2_low(rank: int) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=BFLOAT16)
    return [sharded(rank, policy, warms=warms) for warms in (False, True)]


def parallel(rank: int, **region: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return audited(parallelize_module(net(), mesh, plan), rank, **region)


def tensor_parallel(rank: int) -> Any:
    return parallel(0 * rank, enabled=False)


def tensor_parallel_low(rank: int) -> Any:
    return parallel(0 * rank)


def largest(rank: int) -> Any:
    """Only additions lose precision."""
    model, scale = net(), torch.ones((), dtype=BFLOAT16)
    x = torch.randn(4, 16)

    def step() -> Any:
        dist.all_reduce(scale.view(1), op=dist.ReduceOp.MAX)
        return model(x).square().mean() * rank

    report = amp_fx.audit(step)()
    return [finding.kind for finding in report.findings]


CASES = (*(ddp, ddp_compressed, fsdp2, fsdp2_low, tensor_parallel, tensor_parallel_low), largest)
