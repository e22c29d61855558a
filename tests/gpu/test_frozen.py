"""Frozen graphs and kept casts on the device: writes, streams, captures, threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx import weight_cache
from tests import needs
from tests.gpu.place import DEVICE, MARKS, ON_A_GPU, ON_CUDA
from tests.gpu.test_writes import WRITES, autocast
from tests.weights.nets import SIZE, assert_same, make_net, random

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [*MARKS, needs.FROZEN_GRAPHS]

NUM_VERSIONS = 3

IN_PLACE = (
    "in place",
    "one element of .data",
    "in inference mode",
    "foreach on .data",
    "foreach copy",
    "fused op",
    "compiled by inductor",
    "out=",
    "assigned to .data",
    "load_state_dict",
    "DLPack",
    "storage",
)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    weight_cache.clear()
    with torch.no_grad():
        yield


def batch(size: int = 3) -> torch.Tensor:
    return random(size, SIZE).to(DEVICE)


def compiled_of(model: nn.Module, **options: Any) -> Any:
    options = {"dtype": "bf16", "fallback": False, **options}
    if options.get("compiler", "inductor") == "inductor":
        options["freezing"] = True
    return torch.compile(model, backend="amp_fx", options=options, dynamic=False)


def net_and_twin() -> tuple[Any, Any]:
    return make_net().to(DEVICE), make_net().to(DEVICE)


@pytest.fixture(params=["aot_eager", "inductor"])
def compiler(request: pytest.FixtureRequest) -> str:
    """AOTAutograd keeps casts, inductor freezes."""
    name: str = request.param
    return name


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Inductor's fused kernels round once less than eager code."""
    torch.testing.assert_close(actual, expected, rtol=0.03, atol=0.03)


def test_it_is_frozen_and_no_write_is_missed() -> None:
    net, twin = net_and_twin()
    compiled = compiled_of(net)
    for name in IN_PLACE:
        for i in range(2):
            for model in (net, twin):
                WRITES[name](model, i)
                model.a.weight.data.clamp_(-4, 4)
            for _ in range(2):
                assert_close(compiled(batch()), autocast(twin, batch()))
    stats = weight_cache.stats()
    assert {value.weights for value in stats.values} >= {("a.weight",), ("b.weight",)}
    assert stats.hits > 0


class Projections(nn.Module):
    """Three products of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.q(x)) + torch.relu(self.k(x)) * torch.relu(self.v(x))


@ON_CUDA
def test_projections_are_one_product() -> None:
    torch.manual_seed(0)
    model, twin = Projections().to(DEVICE), Projections().to(DEVICE)
    twin.load_state_dict(model.state_dict())
    compiled, x = compiled_of(model), random(32, 64).to(DEVICE)
    for _ in range(3):
        assert_close(compiled(x), autocast(twin, x))
        for net in (model, twin):
            torch._foreach_mul_([net.k.weight.data], 0.5)
    projections = ["k.weight", "q.weight", "v.weight"]  # inductor chooses their order
    assert projections in [sorted(value.weights) for value in weight_cache.stats().values]


def test_batch_sizes_share_what_is_kept() -> None:
    net, twin = net_and_twin()
    compiled = compiled_of(net)
    assert_close(compiled(batch(3)), autocast(twin, batch(3)))
    before = weight_cache.stats().bytes
    for model in (net, twin):
        model.a.weight.mul_(0.5)
    for size in (5, 3, 5):
        assert_close(compiled(batch(size)), autocast(twin, batch(size)))
        assert weight_cache.stats().bytes == before


@ON_A_GPU
def test_values_made_on_one_stream_are_waited_for_on_another(compiler: str) -> None:
    net, twin = net_and_twin()
    compiled, x = compiled_of(net, compiler=compiler), batch()
    streams: list[Any] = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    for stream in streams:
        with torch.cuda.stream(stream):
            compiled(x)
    for model in (net, twin):
        model.a.weight.data.mul_(1.5)
    expected = autocast(twin, x)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        compiled(x)
    with torch.cuda.stream(streams[1]):
        out = compiled(x)
    torch.cuda.synchronize()
    assert_close(out, expected)


@ON_A_GPU
def test_what_is_replaced_while_another_stream_reads_it_is_kept_until_then() -> None:
    net, twin = net_and_twin()
    compiled, x = compiled_of(net), batch()
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    compiled(x)
    expected = autocast(twin, x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        out = compiled(x)
    net.a.weight.data = torch.zeros_like(net.a.weight)
    compiled(x)
    noise = [torch.full((SIZE, SIZE), 7.0, device=DEVICE).bfloat16() for _ in range(64)]
    torch.cuda.synchronize()
    assert_close(out, expected)
    del noise


@ON_CUDA
def test_what_the_user_captures_makes_its_values_anew(compiler: str) -> None:
    net, twin = net_and_twin()
    compiled, x = compiled_of(net, compiler=compiler), batch()
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compiled(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x)
    for _ in range(3):
        graph.replay()
        assert_close(out, autocast(twin, x))
        for model in (net, twin):
            model.a.weight.data.mul_(1.5)
    assert_close(compiled(x), autocast(twin, x))


@ON_A_GPU
def test_cuda_graphs_of_inductor_are_not_frozen() -> None:
    """Passes casts as inputs, because a constant of the code would be an address in the graph."""
    net, twin = net_and_twin()
    compiled = compiled_of(net, **{"triton.cudagraphs": True})
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        assert_close(compiled(batch()).clone(), autocast(twin, batch()))
        for model in (net, twin):
            model.a.weight.data.mul_(1.3)
    assert {value.ops for value in weight_cache.stats().values} == {("convert_element_type",)}


@ON_CUDA
def test_calls_wait_for_nothing(compiler: str) -> None:
    net, twin = net_and_twin()
    compiled, x = compiled_of(net, compiler=compiler), batch()
    for _ in range(20):
        compiled(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            out = compiled(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if compiler == "aot_eager":
        assert_same(out, autocast(twin, x))
    assert_close(out, autocast(twin, x))


class Chain(nn.Module):
    """Two products with matrices of one number each, a power of two that the output tells."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x))
        return out


def test_threads_that_call_while_weights_are_written(compiler: str) -> None:
    """A call that no write overlaps gives the newest version, another one lies between versions.

    As in native calls, a write that overlaps shows in any element or in none.
    """
    model = Chain().to(DEVICE)
    compiled, x = compiled_of(model, compiler=compiler), torch.ones(4, 64, device=DEVICE)
    wrong: list[str] = []
    num_undisturbed = count = 0
    end = 0.0

    def publish() -> None:
        """Writes the next version; ``count`` is odd meanwhile."""
        nonlocal count
        count += 1
        version = (count // 2 + 1) % NUM_VERSIONS
        for weight, power in zip(model.parameters(), (1, 5), strict=True):
            new = torch.full_like(weight, 2.0 ** (power * version))
            if count % 4 == 1:
                weight.data.copy_(new)
            else:
                weight.data = new
        count += 1

    def serve() -> None:
        nonlocal num_undisturbed
        while time.monotonic() < end:
            before = count
            with torch.no_grad():
                out = compiled(x) / 64**2
            after = count
            versions = {v % NUM_VERSIONS for v in range(before // 2, (after + 1) // 2 + 1)}
            least, greatest = 2.0 ** (6 * min(versions)), 2.0 ** (6 * max(versions))
            if not least <= float(out.min()) <= float(out.max()) <= greatest:
                wrong.append(f"{out.min()} to {out.max()}, not {least} to {greatest}")
            num_undisturbed += before == after and before % 2 == 0

    count = -2
    for i in range(8):  # compiles what is called after a write, and after none
        if i < 4:
            publish()
        compiled(x)
    end = time.monotonic() + 4
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(serve) for _ in range(8)]
        while time.monotonic() < end - 2:
            publish()
            time.sleep(0.01)
    for each in calls:
        each.result()
    assert not wrong, wrong[:5]
    assert num_undisturbed
