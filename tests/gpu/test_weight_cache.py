"""Kept copies on CUDA: the fused kernels, streams, CUDA graphs of inductor and of the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack

import amp_fx
from tests.gpu.place import MARKS, ON_A_GPU, ON_CUDA
from tests.weights.nets import Net, assert_same, make_net, random

pytestmark = [*MARKS, ON_CUDA]


def net_and_twin() -> tuple[Net, Net]:
    return make_net().cuda(), make_net().cuda()


def batch() -> torch.Tensor:
    return random(3, 4).cuda()


def compiled_of(model: Any, mode: str | None = None, **options: Any) -> Any:
    return torch.compile(
        model,
        backend="amp_fx",
        mode=mode,
        options={"weight_cache": "training", **(options or {"compiler": "aot_eager"})},
        dynamic=False,
    )


def autocast(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        out: torch.Tensor = model(x).float()
        return out


@pytest.mark.parametrize("way", ["foreach", "fused", "capturable"])
def test_optimizers(way: str) -> None:
    net, twin = net_and_twin()
    compiled = compiled_of(net, compiler="aot_eager", dtype="bfloat16")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, **{way: True}) for m in (net, twin)]  # type: ignore[arg-type]
    for _ in range(3):
        out, expected = compiled(batch()), autocast(twin, batch())
        assert_same(out, expected)
        out.sum().backward()
        expected.sum().backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            assert_same(compiled(batch()), autocast(twin, batch()))


@torch.no_grad()
def test_a_graph_that_the_user_captures_casts_anew() -> None:
    net, twin = net_and_twin()
    compiled = compiled_of(net, compiler="aot_eager", dtype="bfloat16")
    x = batch()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compiled(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x)
    for _ in range(3):
        graph.replay()
        assert_same(out, autocast(twin, x))
        for model in (net, twin):
            model.a.weight.data.mul_(1.5)


@ON_A_GPU
@torch.no_grad()
def test_a_refresh_on_one_stream_is_waited_for_on_another() -> None:
    net, twin = net_and_twin()
    compiled = compiled_of(net, compiler="aot_eager", dtype="bfloat16")
    x = batch()
    compiled(x)
    for model in (net, twin):
        model.a.weight.data.mul_(1.5)
    expected = autocast(twin, x)
    torch.cuda.synchronize()
    first, second = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(first):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        compiled(x)
    with torch.cuda.stream(second):
        out = compiled(x)
    torch.cuda.synchronize()
    assert_same(out, expected)


@torch.no_grad()
def test_a_write_through_an_old_alias_is_declared() -> None:
    """Writes through an alias with a separate storage, which no signal reports."""
    net, twin = net_and_twin()
    compiled = compiled_of(net, compiler="aot_eager", dtype="bfloat16")
    alias = from_dlpack(net.a.weight.detach())
    for _ in range(3):
        assert_same(compiled(batch()), autocast(twin, batch()))
        for weight in (alias, twin.a.weight):
            weight.mul_(2.0)
        amp_fx.weight_cache.invalidate()


@torch.no_grad()
def test_calls_wait_for_nothing() -> None:
    net, twin = net_and_twin()
    compiled = compiled_of(net, compiler="aot_eager", dtype="bfloat16")
    x = batch()
    for _ in range(20):  # tables are sent, kernels compiled
        compiled(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            out = compiled(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(out, autocast(twin, x))
