"""Kept casts on the device: every kind of write, every optimizer in every implementation."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

import amp_fx
from tests.gpu.place import DEVICE, MARKS, ON_A_GPU, ON_CUDA
from tests.weights.nets import SIZE, Net, assert_same, make_net, random

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = MARKS


def other(i: int) -> torch.Tensor:
    return random(SIZE, SIZE, seed=1000 + i).to(DEVICE)


def batch() -> torch.Tensor:
    return random(3, SIZE).to(DEVICE)


def compiled_of(net: nn.Module) -> Any:
    options: dict[str, Any] = {"compiler": "aot_eager", "dtype": "bf16"}
    options["weight_cache"] = "training"
    return torch.compile(net, backend="amp_fx", options=options, dynamic=False)


def autocast(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        out: torch.Tensor = net(x).float()
        return out


def replace(net: Net, i: int) -> None:
    net.a.weight = nn.Parameter(other(i))


def fused(net: Net, i: int) -> None:
    """The op itself, under no optimizer."""
    torch._fused_sgd_(
        [net.a.weight.data],
        [other(i)],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.5,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def compiled_write(net: Net, i: int) -> None:
    _scale(net.a.weight, torch.tensor(1.5 + i, device=DEVICE))


@functools.partial(torch.compile, dynamic=False)
def _scale(weight: torch.Tensor, by: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(by)


WRITES: dict[str, Callable[[Net, int], Any]] = {
    "in place": lambda net, _: net.a.weight.mul_(1.5),
    "one element": lambda net, i: net.a.weight.__setitem__((i % SIZE, 1), 3.0 + i),
    "in place on .data": lambda net, _: net.a.weight.data.mul_(1.5),
    "one element of .data": lambda net, i: net.a.weight.data.__setitem__((1, i % SIZE), 3.0 + i),
    "in inference mode": lambda net, _: torch.inference_mode()(net.a.weight.data.mul_)(1.5),
    "foreach": lambda net, _: torch._foreach_mul_(list(net.parameters()), 1.5),
    "foreach on .data": lambda net, _: torch._foreach_mul_([p.data for p in net.parameters()], 1.5),
    "foreach copy": lambda net, i: torch._foreach_copy_([net.a.weight.data], [other(i)]),
    "fused op": fused,
    "compiled by inductor": compiled_write,
    "out=": lambda net, i: torch.mul(other(i), 2.0, out=net.a.weight),
    "assigned to .data": lambda net, i: setattr(net.a.weight, "data", other(i)),
    "another parameter": replace,
    "load_state_dict": lambda net, i: net.load_state_dict(make_net(i + 1).state_dict()),
    "DLPack": lambda net, _: from_dlpack(net.a.weight.detach()).mul_(1.5),
    "storage": lambda net, i: net.a.weight.untyped_storage().copy_(other(i).untyped_storage()),
    "moved away and back": lambda net, _: net.cpu().to(DEVICE),
    "half and back": lambda net, _: net.half().float().a.weight.data.mul_(1.25),
}
if DEVICE == "cuda":
    WRITES["from pinned memory"] = lambda net, i: net.a.weight.data.copy_(
        other(i).cpu().pin_memory(), non_blocking=True
    )


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_noticed(write: str, has_gradients: bool) -> None:
    net, twin = make_net().to(DEVICE), make_net().to(DEVICE)
    compiled = compiled_of(net)
    with torch.set_grad_enabled(has_gradients):
        for i in range(4):
            assert_same(compiled(batch()), autocast(twin, batch()))
            for model in (net, twin):
                with torch.no_grad():
                    WRITES[write](model, i)
            assert_same(compiled(batch()), autocast(twin, batch()))


@torch.no_grad()
def test_a_write_through_an_old_alias_is_declared() -> None:
    """Writes through an alias with a separate storage, which no signal reports."""
    net, twin = make_net().to(DEVICE), make_net().to(DEVICE)
    compiled = compiled_of(net)
    alias = from_dlpack(net.a.weight.detach())
    for _ in range(3):
        assert_same(compiled(batch()), autocast(twin, batch()))
        for weight in (alias, twin.a.weight):
            weight.mul_(2.0)
        amp_fx.weight_cache.invalidate()


WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}


def implementations() -> list[tuple[str, str]]:
    """Optimizers with what they take as an implementation."""
    found = []
    for name, kind in sorted(vars(torch.optim).items()):
        if not inspect.isclass(kind) or not issubclass(kind, torch.optim.Optimizer):
            continue
        if name in ("Optimizer", "SparseAdam", "LBFGS"):
            continue
        allowed = inspect.signature(kind).parameters
        found += [(name, way) for way, given in WAYS.items() if set(given) <= set(allowed)]
    return found


def step(optimizer: Any, out: torch.Tensor) -> None:
    optimizer.zero_grad()
    out.square().mean().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@pytest.mark.parametrize(("name", "way"), implementations())
def test_an_optimizers_step_is_noticed(name: str, way: str) -> None:
    if way == "capturable" and DEVICE == "cpu":
        pytest.skip("capturable steps are for devices")
    net, twin = make_net().to(DEVICE), make_net().to(DEVICE)
    matrices = [[p for p in model.parameters() if p.dim() == 2] for model in (net, twin)]  # Muon
    optimizers = [getattr(torch.optim, name)(ps, lr=0.1, **WAYS[way]) for ps in matrices]
    compiled = compiled_of(net)
    before = net.a.weight.detach().clone()
    for _ in range(3):
        for optimizer, program in zip(
            optimizers, (compiled, functools.partial(autocast, twin)), strict=True
        ):
            step(optimizer, program(batch()))
        with torch.no_grad():
            assert_same(compiled(batch()), autocast(twin, batch()))
    assert not torch.equal(before, net.a.weight)


@ON_A_GPU
@torch.no_grad()
def test_a_weight_is_held_for_the_stream_that_reads_it() -> None:
    """Combines ``record_stream`` with the watch on the storage."""
    layer = nn.Linear(4096, 4096, bias=False).to(DEVICE)
    address, shape = layer.weight.untyped_storage().data_ptr(), layer.weight.shape
    compiled = compiled_of(layer)
    compiled(torch.ones(1, 4096, device=DEVICE))
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    layer.weight.record_stream(side)
    del layer, compiled
    torch._dynamo.reset()
    again = torch.empty(shape, device=DEVICE)
    assert again.untyped_storage().data_ptr() != address
    torch.cuda.synchronize()


@ON_CUDA
@torch.no_grad()
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_two_devices() -> None:
    nets = [make_net().to(f"cuda:{i}") for i in range(2)]
    twins = [make_net().to(f"cuda:{i}") for i in range(2)]
    compiled = [compiled_of(net) for net in nets]
    for _ in range(3):
        for i in (1, 0):
            x = random(3, SIZE).to(f"cuda:{i}")
            assert_same(compiled[i](x), autocast(twins[i], x))
            for model in (nets[i], twins[i]):
                model.a.weight.data.mul_(1.5)
                torch._foreach_mul_([model.b.weight.data], 1.5)


@ON_A_GPU
def test_a_compiled_optimizer_in_a_cuda_graph_is_noticed() -> None:
    """Replays a step that writes weights and requests no pointer from PyTorch."""
    net, twin = make_net().to(DEVICE), make_net().to(DEVICE)
    compiled = compiled_of(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, mode="reduce-overhead")
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        compiled(batch()).sum().backward()
        step()
        twin.load_state_dict(net.state_dict())
        with torch.no_grad():
            assert_same(compiled(batch()), autocast(twin, batch()))


def test_casts_are_kept_at_all() -> None:
    net = make_net().to(DEVICE)
    compiled = compiled_of(net)
    amp_fx.weight_cache.clear()
    with torch.no_grad():
        for _ in range(5):
            compiled(batch())
    stats = amp_fx.weight_cache.stats()
    assert (stats.entries, stats.refreshes) == (3, 3)
