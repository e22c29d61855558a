"""FSDP2 with ``amp_fx.fsdp_policy``, and what it sends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization

import amp_fx
from amp_fx import stats
from amp_fx.replaced import replaced
from tests.distributed.nets import OPTIONS, as_it_is, compare, compiled, make_net

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIELDS = {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}
WIDTH = 64  # of narrower models norms have more than one weight in a hundred
CAN_TELL_APART = "param_dtype_override_fn" in FIELDS


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts the bytes that this process hands to collectives."""
    sent = {"gathered": 0, "reduced": 0}

    def counting(key: str, name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs["input"] if "input" in kwargs else args[1]
            sent[key] += given.numel() * given.element_size()
            return original(*args, **kwargs)

        return dist, name, call

    gathers = counting("gathered", "all_gather_single")
    with replaced(gathers, counting("reduced", "reduce_scatter_single")):
        yield sent


def without_sync(model: Any) -> Any:
    """Disables the synchronization of gradients, so that the next micro-batch adds to them."""

    @contextlib.contextmanager
    def region() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    return region()


def shard(compile_: Any, *, policy: Any, by_block: bool, **options: Any) -> Any:
    """Compiled and sharded block by block, or the whole at once."""
    model = make_net(WIDTH)
    if policy is not None:
        options["mp_policy"] = policy(model)
    parts = [*model.blocks, model.first, model.last] if by_block else [model]
    for part in parts:
        if compile_ is not as_it_is:
            part.compile(backend="amp_fx", options=OPTIONS)
        fully_shard(part, **options)
    return fully_shard(model, **options) if by_block else model


def own_policy(model: Any) -> Any:
    with torch.device("meta"):
        explanation = amp_fx.explain(type(model)(WIDTH))(torch.empty(4, 16))
    return amp_fx.fsdp_policy(model, explanation)


def gathered_low(rank: int) -> Any:
    """Losses beside those of eager autocast that gathers in float32, and bytes of both."""
    if not CAN_TELL_APART:
        return None
    found: dict[str, Any] = {}
    for name, options in {
        "block": {"by_block": True},
        "whole": {"by_block": False},
        "kept": {"by_block": True, "reshard_after_forward": False},
    }.items():
        found[name] = both = {}
        for which, policy in (("eager", None), ("ours", own_policy)):
            how = {"policy": policy, **options}
            with counted() as sent:
                losses = compare(
                    lambda c, how=how: shard(c, **how),  # type: ignore[misc]
                    rank,
                    without_sync=without_sync,
                    only=which,
                )
            both[which] = losses[which], sent
    return found


class Gather(nn.Module):
    def forward(self, weight: Any) -> Any:
        whole = weight.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])


def simple(compile_: Any) -> Any:
    """SimpleFSDP: weights are gathered by what the graph itself says."""
    model = make_net()
    mesh = init_device_mesh("cpu", (2,))
    for module in list(model.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(weight.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(spread))
            register_parametrization(module, name, Gather(), unsafe=True)
    return compile_(model)


def gathered_in_graph(rank: int) -> Any:
    """Losses with and without ``narrow_gathers``, and what was counted."""
    found = {}
    for narrows in (True, False):
        before = stats.snapshot()
        compile_ = functools.partial(compiled, narrow_gathers=narrows)
        only = None if narrows else "ours"
        losses = compare(simple, rank, compile_with=compile_, only=only)
        done = stats.snapshot()
        done.subtract(before)
        found[narrows] = losses, dict(done)
    return found


def sharded_already(rank: int) -> Any:  # noqa: ARG001
    """Returns the errors about a model that is sharded already."""
    model: Any = fully_shard(make_net())
    return [
        _said(lambda: amp_fx.explain(model)(torch.ones(4, 16))),
        _said(lambda: amp_fx.fsdp_policy(model, {})),
    ]


def _said(ask: Callable[[], Any]) -> str:
    try:
        ask()
    except amp_fx.errors.AmpFxError as error:
        return str(error)
    return ""
