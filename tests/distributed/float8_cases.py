"""Products in float8 whose weights FSDP2 or tensor parallelism shards."""

from __future__ import annotations

import contextlib
import copy
import functools
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amp_fx
from amp_fx import stats
from tests.distributed.nets import NUM_MICRO, NUM_UPDATES, OPTIONS, batch, compiled, make_net, train
from tests.float8.torchao_oracle import RECIPES, bfloat16_of_cuda, cast_inputs, converted

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
            block.compile(backend="amp_fx", options={**OPTIONS, "policy": PRESET})
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
            before = stats.snapshot()
            model: Any = sharded(gathers, is_compiled=is_compiled)
            mine = train(model, rank, context=region)
            done = stats.snapshot()
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


def float8_tensor_parallel(rank: int) -> Any:  # noqa: ARG001
    """What has the bits of torchao's layers in the same wrapper, and why another size stays low."""
    found: dict[Any, Any] = {}
    if find_spec("torchao") is None:
        return found
    for recipe in RECIPES:
        policy = amp_fx.Policy.default().with_ops({"linear": "float8"}).with_float8(recipe)
        with bfloat16_of_cuda():
            expected = _numbers(_by_columns_and_rows(converted(two_layers(), recipe, whole=True)))
        for how in ("eager", "compiled"):
            torch._dynamo.reset()
            model = _by_columns_and_rows(two_layers())
            call = compiled(model, policy=policy) if how == "compiled" else model
            numbers = _numbers(
                model, call, functools.partial(amp_fx.autocast, "cpu", policy=policy)
            )
            pairs = zip(numbers, expected, strict=True)
            found[recipe, how] = [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    gathered = {"0": ColwiseParallel(output_layouts=Replicate())}
    for width, plan in ((48, None), (49, gathered)):
        torch._dynamo.reset()
        model = _by_columns_and_rows(two_layers(width), plan)
        report = amp_fx.explain(model, policy=policy)(torch.ones(16, 32))
        linear = [n.reason for g in report.graphs for n in g.nodes if n.op == "aten.linear"]
        found["why", width] = linear
    return found


def two_layers(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32))


def _by_columns_and_rows(model: nn.Module, plan: Any = None) -> nn.Module:
    plan = plan or {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    cast_inputs(model)  # behind the hooks that spread them
    return model


def _numbers(model: nn.Module, call: Any = None, context: Any = None) -> list[torch.Tensor]:
    """Outputs, gradients and weights of some updates; all processes have the same inputs."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[torch.Tensor] = []
    for _ in range(NUM_UPDATES):
        for _ in range(NUM_MICRO):
            x = torch.randn(16, 32, requires_grad=True)
            with context() if context else contextlib.nullcontext():
                y = (call or model)(x)
            y.float().square().mean().backward()
            assert x.grad is not None
            found += [y.detach(), x.grad]
        found += [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]
