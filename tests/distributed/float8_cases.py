"""Products in float8 whose weights FSDP2 or tensor parallelism shards."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import amp_fx
from tests.distributed import scaler_cases
from tests.distributed.nets import (
    NUM_MICRO,
    NUM_UPDATES,
    as_it_is,
    batch,
    compiled,
    make_net,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PRESET = "float8-rowwise"
LOW = torch.bfloat16
GATHERS = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32),
}
region = functools.partial(amp_fx.autocast, "cpu", policy=PRESET)


def sharded(gathers: str, *, is_compiled: bool) -> nn.Module:
    model = make_net()
    for block in model.blocks:
        if is_compiled:
            block.compile(backend="amp_fx", options={"compiler": "aot_eager", "policy": PRESET})
        fully_shard(block, mp_policy=GATHERS[gathers])
    fully_shard(model, mp_policy=GATHERS[gathers])
    return model


def whole(gathers: str) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Losses by rank, and weights, of one process that has all batches and all weights."""
    model = make_net()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    losses: list[list[float]] = [[], []]
    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        for micro in range(NUM_MICRO):
            both = [_gradients(model, gathers, batch(update, micro, r)) for r in (0, 1)]
            for found, (loss, _) in zip(losses, both, strict=True):
                found.append(loss)
            for weight, *pair in zip(weights, *(g for _, g in both), strict=True):
                mean = (pair[0].float() + pair[1].float()) / 2
                weight.grad = mean if weight.grad is None else weight.grad + mean
        optimizer.step()
    return losses, [weight.detach() for weight in weights]


def _gradients(model: nn.Module, gathers: str, pair: Any) -> tuple[float, Any]:
    x, y = pair
    if gathers == "bfloat16":
        model, x = copy.deepcopy(model).to(LOW), x.to(LOW)
    with region():
        loss = nn.functional.mse_loss(model(x).float(), y)
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def float8_fsdp2(rank: int) -> Any:
    """Which losses and weights are those of one process, and how many products are in float8."""
    found: dict[Any, Any] = {}
    for gathers in GATHERS:
        losses, weights = whole(gathers)
        for is_compiled in (False, True):
            torch._dynamo.reset()
            before = amp_fx.stats.snapshot()
            model: Any = sharded(gathers, is_compiled=is_compiled)
            mine = train(model, rank, context=region)
            done = amp_fx.stats.snapshot()
            done.subtract(before)
            full = [p.full_tensor().detach() for p in model.parameters()]
            found[gathers, is_compiled] = (
                mine == losses[rank],
                all(map(torch.equal, full, weights)),
                done["products_in_float8"],
            )
    with torch.autocast("cpu", LOW):
        plain = train(make_net(), rank)
    found["plain"] = plain != losses[rank]
    return found


def float8_tensor_parallel(rank: int) -> Any:
    """Losses under a float8 policy, compiled and eager, beside those under none; and why."""

    def losses(compile_: Callable[[Any], Any], context: Any = None) -> Any:
        torch._dynamo.reset()
        model = compile_(scaler_cases.tensor_parallel(make_net()))
        return train(model, rank, **({} if context is None else {"context": context}))

    policy = amp_fx.Policy.default().with_modules({"blocks.*": "float8"})
    within = functools.partial(amp_fx.autocast, "cpu", policy=policy)
    model = scaler_cases.tensor_parallel(make_net())
    dist.barrier()
    report = amp_fx.explain(model, policy=policy)(torch.ones(4, 16))
    notes = {n.reason for g in report.graphs for n in g.nodes if "not in float8" in n.reason}
    return {
        "plain": losses(as_it_is),
        "eager": losses(as_it_is, within),
        "compiled": losses(functools.partial(compiled, policy=policy)),
        "why": sorted(notes),
    }
