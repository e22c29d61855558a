"""CUDA graphs: inductor's, those of ``make_graphed_callables``, those of another thread."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import weight_cache
from tests.gpu.place import DEVICE, IS_EMULATED, MARKS, ON_CUDA
from tests.weights.nets import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = MARKS

NUM_UPDATES = 4
NUM_MICRO = 3


def net_and_twin() -> tuple[nn.Module, nn.Module]:
    weight_cache.clear()
    torch.manual_seed(0)
    net, twin = (
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)).to(DEVICE) for _ in range(2)
    )
    twin.load_state_dict(net.state_dict())
    return net, twin


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(24, 32, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def autocast(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        return model(x).float()


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)


@pytest.fixture
def num_recordings(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the graphs that inductor recorded so far.

    Relies on ``CUDAGraphTreeManager.new_graph_id`` counting them.
    """
    if IS_EMULATED:
        from tests.cuda.cuda_graphs import record_graphs

        graphs = record_graphs(monkeypatch)
        return lambda: sum(graph.num_recordings for graph in graphs)
    from torch._inductor import cudagraph_trees

    made: list[object] = []
    new_id = cudagraph_trees.CUDAGraphTreeManager.new_graph_id

    def counted(manager: Any) -> Any:
        made.append(manager)
        return new_id(manager)

    monkeypatch.setattr(cudagraph_trees.CUDAGraphTreeManager, "new_graph_id", counted)
    return lambda: len(made)


@ON_CUDA
@pytest.mark.parametrize("is_trained", [True, False])
def test_graphs_are_recorded_once_and_casts_made_once_per_write(
    is_trained: bool, num_recordings: Callable[[], int]
) -> None:
    """``mode="reduce-overhead"``: copies stay where the recordings look for them.

    Gradients are added to memory of their own: that of a recording is written by its next replay.
    """
    net, twin = net_and_twin()
    for parameter in (*net.parameters(), *twin.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    options: Any = {"dtype": "bfloat16", "mode": "reduce-overhead", "weight_cache": "training"}
    options["fallback"] = False
    compiled = torch.compile(net, backend="amp_fx", options=options)
    after_writes = []
    for update in range(NUM_UPDATES):
        for micro in range(NUM_MICRO):
            x = batch(10 * update + micro)
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            with torch.set_grad_enabled(is_trained):
                out, expected = compiled(x), autocast(twin, x)
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
            if is_trained:
                loss_of(out).backward()  # type: ignore[no-untyped-call]
                loss_of(expected).backward()  # type: ignore[no-untyped-call]
        for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=5e-2, atol=2e-3)
        after_writes.append((num_recordings(), weight_cache.stats().refreshes))
        for model in (net, twin):
            torch._foreach_mul_([parameter.data for parameter in model.parameters()], 0.9)
            model.zero_grad(set_to_none=False)
    recordings, refreshes = zip(*after_writes, strict=True)
    assert recordings[0] > 0
    assert set(recordings) == {recordings[0]}, "recorded again after a write"
    num_kept = weight_cache.stats().entries
    assert refreshes == tuple(num_kept * (i + 1) for i in range(NUM_UPDATES))


class Holder(nn.Module):
    """A module whose ``forward`` may be replaced; the compiled one stays as it is."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


@ON_CUDA
def test_graphed_callables_follow_the_weights() -> None:
    """Casts the weights in the graph, because replays run no Python."""
    net, twin = net_and_twin()
    options: Any = {"compiler": "aot_eager", "dtype": "bfloat16", "weight_cache": "training"}
    options["fallback"] = False
    compiled = torch.compile(net, backend="amp_fx", options=options)
    graphed = torch.cuda.make_graphed_callables(Holder(compiled), (batch(),))
    optimizers = [sgd(model) for model in (net, twin)]
    for update in range(NUM_UPDATES):
        x = batch(update)
        outputs: Any = graphed(x), autocast(twin, x)
        assert_same(*outputs)
        for out, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(out).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert_same(mine, theirs)
    with torch.no_grad():
        assert_same(compiled(x), autocast(twin, x))


@contextlib.contextmanager
def capture_elsewhere() -> Iterator[None]:
    """Captures a CUDA graph in another thread in the mode ``"global"``, the default.

    In this mode, CUDA lets no thread query an event, pin memory or allocate: the call fails, and
    so does the capture.
    """
    if DEVICE == "cpu":
        yield
        return
    if IS_EMULATED:
        from tests.cuda.device import capture_elsewhere as pretend_to_capture

        with pretend_to_capture():
            yield
        return
    graph, x = torch.cuda.CUDAGraph(), torch.ones(64, device=DEVICE)
    has_begun, may_end = threading.Event(), threading.Event()

    def capture() -> torch.Tensor:
        with torch.cuda.graph(graph):
            doubled = 2 * x
            has_begun.set()
            may_end.wait(60)
            return doubled + 1

    with ThreadPoolExecutor(1) as pool:
        captured = pool.submit(capture)
        try:
            assert has_begun.wait(60)
            yield
        finally:
            may_end.set()
    graph.replay()
    assert captured.result().tolist() == [3.0] * 64


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_calls_do_not_end_a_capture_in_another_thread(compiler: str) -> None:
    net, twin = net_and_twin()
    options: Any = {"compiler": compiler, "dtype": "bfloat16", "weight_cache": "training"}
    options["fallback"] = False
    compiled, x = torch.compile(net, backend="amp_fx", options=options), batch()

    def call_and_write() -> torch.Tensor:
        for _ in range(2):
            torch._foreach_mul_(list(net.parameters()), 0.99)
            for _ in range(3):
                out: torch.Tensor = compiled(x)
        return out

    with torch.no_grad():
        call_and_write()
        with capture_elsewhere():
            found = call_and_write()
        twin.load_state_dict(net.state_dict())
        if compiler == "aot_eager":
            assert_same(found, autocast(twin, x))
        torch.testing.assert_close(found, autocast(twin, x), rtol=2e-2, atol=2e-2)


def test_scaled_steps_do_not_end_a_capture_in_another_thread() -> None:
    """The scale falls with each step, and is read again and again once it is small."""
    weight = nn.Parameter(torch.ones(64, device=DEVICE))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = amp_fx.GradScaler(DEVICE, init_scale=2.0**12, growth_interval=100)
    scaler.scale(torch.ones((), device=DEVICE))

    def step(num_steps: int) -> None:
        for _ in range(num_steps):
            weight.grad = torch.full_like(weight, torch.inf)
            scaler.step(optimizer)
            scaler.update()

    step(4)
    with capture_elsewhere():
        step(4)
    assert scaler.get_scale() == 16.0
    assert weight.tolist() == [1.0] * 64
