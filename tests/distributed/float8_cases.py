"""Products in float8 whose weights FSDP2 shards."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import amp_fx
from amp_fx import stats
from tests.distributed.nets import NUM_MICRO, NUM_UPDATES, OPTIONS, Net, batch, make_net, train

PRESET = "float8-rowwise"
LOW = torch.bfloat16
GATHERS = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32),
}
region = functools.partial(amp_fx.autocast, "cpu", policy=PRESET)


def compile_blocks(model: Net) -> None:
    for block in model.blocks:
        block.compile(backend="amp_fx", options={**OPTIONS, "policy": PRESET})


def sharded(gathers: str) -> nn.Module:
    model = make_net()
    compile_blocks(model)
    for block in model.blocks:
        fully_shard(block, mp_policy=GATHERS[gathers])
    fully_shard(model, mp_policy=GATHERS[gathers])
    return model


def whole(gathers: str) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Losses by rank, and weights, of one process that has all batches and all weights."""
    model = make_net()
    compile_blocks(model)
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


def _gradients(model: Net, gathers: str, pair: Any) -> tuple[float, Any]:
    x, y = pair
    if gathers == "bfloat16":
        model, x = copy.deepcopy(model).to(LOW), x.to(LOW)
        compile_blocks(model)  # a copy is not compiled
    with region():
        loss = nn.functional.mse_loss(model(x).float(), y)
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def float8_fsdp2(rank: int) -> Any:
    """Compares losses and weights with those of one process, and counts float8 products."""
    found: dict[Any, Any] = {}
    for gathers in GATHERS:
        losses, weights = whole(gathers)
        torch._dynamo.reset()
        before = stats.snapshot()
        model: Any = sharded(gathers)
        mine = train(model, rank, context=region)
        done = stats.snapshot()
        done.subtract(before)
        full = [p.full_tensor().detach() for p in model.parameters()]
        found[gathers] = (
            mine == losses[rank],
            all(map(torch.equal, full, weights)),
            done["products_in_float8"],
        )
    with torch.autocast("cpu", LOW):
        plain = train(make_net(), rank)
    found["plain"] = plain != losses[rank]
    return found
