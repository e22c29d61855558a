"""Calls during which a process forks, an error is raised, or a model is deleted."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from amp_fx import weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.weights import store
from tests import needs
from tests.distributed.spawn import run_ranks
from tests.weights.machine import PENDING, Session, run_all
from tests.weights.nets import (
    EVAL,
    FROZEN,
    SIZE,
    Graph,
    assert_same,
    autocast,
    compile_amp_fx,
    inputs,
    make_net,
)
from tests.weights.writes import other

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]


@torch.no_grad()
def test_a_model_is_deleted_while_a_thread_is_inside() -> None:
    def program(model: nn.Module, x: torch.Tensor, meet: Callable[[], None]) -> torch.Tensor:
        first = model(x)
        torch._dynamo.graph_break()
        meet()
        second: torch.Tensor = model(x) + first
        return second

    compiled = compile_amp_fx(program)
    expected = compiled(make_net(), inputs(), lambda: None)
    for _ in range(5):
        nets = [make_net()]
        results: list[torch.Tensor] = []
        inside, deleted = threading.Event(), threading.Event()

        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def meet(inside: Any = inside, deleted: Any = deleted) -> None:
            inside.set()
            assert deleted.wait(30)

        @torch.no_grad()
        def caller(nets: Any = nets, results: Any = results, meet: Any = meet) -> None:
            results.append(compiled(nets.pop(), inputs(), meet))

        def deleter(inside: Any = inside, deleted: Any = deleted) -> None:
            assert inside.wait(30)
            gc.collect()
            weight_cache.clear()
            deleted.set()

        run_all(caller, deleter)
        assert_same(results, [expected])


@torch.no_grad()
def test_a_call_during_a_refresh_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is armed again before its copy is written: no other call may trust that."""
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    compiled(inputs())
    compiled(inputs())
    for model in (net, twin):
        model.a.weight.data.mul_(2)
    started, finished = threading.Event(), threading.Event()
    original = store.STORE._recompute

    def slow(*args: Any) -> Any:
        if not started.is_set():
            started.set()
            finished.wait(1)
        return original(*args)

    monkeypatch.setattr(store.STORE, "_recompute", slow)
    results: list[torch.Tensor] = []

    def first() -> None:
        with torch.no_grad():
            results.append(compiled(inputs()))

    def second() -> None:
        assert started.wait(10)
        with torch.no_grad():
            results.append(compiled(inputs()))
        finished.set()

    run_all(first, second)
    assert_same(results, [autocast(twin, inputs())] * 2)


FORK = """
import os, threading, torch, amp_fx
from tests.weights.nets import EVAL, TRAIN, compile_amp_fx, make_net
net, twin = make_net(), make_net()
compiled = compile_amp_fx(net)
other = torch.ones(4)
kept = amp_fx.keep(lambda w: w * 2, other)
stop = threading.Event()

def call():
    while not stop.is_set():
        kept(), kept.invalidate()

def check(factor, graphs=(EVAL, TRAIN, EVAL)):
    for model in (net, twin):
        for parameter in model.parameters():
            parameter.data.mul_(factor)
    for graph in graphs:
        graph.check(compiled, net, twin)

check(1.0)
thread = threading.Thread(target=call)  # what it locks may be locked in the child
thread.start()
child = os.fork()
if not child:
    other.add_(1)
    assert torch.equal(kept(), other * 2)
    assert torch.equal(amp_fx.keep(lambda w: w + 1, other)(), other + 1)
    # Builds for accelerators refuse a backward in a fork.
    graphs = (EVAL, EVAL) if torch.version.cuda else (EVAL, TRAIN)
    check(3.0, graphs)
    check(0.5, graphs)
    os._exit(0)
check(2.0)
check(0.5)
assert os.waitpid(child, 0)[1] == 0, "the child failed"
stop.set()
thread.join()
assert torch.equal(kept(), torch.full((4,), 2.0))
check(1.5)
"""

WRITING = """
import os, signal, sys, threading, torch
from amp_fx.weights.watch import engine
weight = torch.ones(8)
engine().watch(weight)
sys.setswitchinterval(1e-4)
def write():
    while True:
        engine().watch(weight)
        weight.add_(1)
for _ in range(2):
    threading.Thread(target=write, daemon=True).start()
for _ in range(150):
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        engine().watch(weight)
        weight.add_(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "a child hung"
os._exit(0)
"""


@pytest.mark.one_in(2)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    "program",
    [pytest.param(FORK, id="fork"), pytest.param(WRITING, id="writing", marks=pytest.mark.slow)],
)
def test_processes_that_fork(program: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", program]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # libgomp's threads do not survive a fork
    done = subprocess.run(
        command, cwd=ROOT, env=one_thread, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


@needs.FROZEN_GRAPHS
@pytest.mark.parametrize("way", ["eval", "packed"])
def test_an_error_inside_a_call(way: str) -> None:
    def fail() -> None:
        raise ValueError("of the code")

    session = Session("event")
    session.settle(way)
    PENDING.append(fail)
    with pytest.raises(ValueError, match="of the code"):
        session.call(way)
    session.run([("write", "everything"), ("settle", way)])


@needs.FROZEN_GRAPHS
@pytest.mark.parametrize(
    ("graph", "module", "function"),
    [(EVAL, torch, "empty_strided"), (EVAL, store, "foreach_copy_"), (FROZEN, store, "compute")],
)
@pytest.mark.parametrize("is_first_call", [True, False])
@torch.no_grad()
def test_out_of_memory_in_a_refresh(
    graph: Graph, module: Any, function: str, is_first_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be raised, as it is, or done without; the next call is right in any case."""
    net, twin = make_net(), make_net()
    compiled, other_graph = graph.compile(net), compile_amp_fx(net.a)
    EVAL.check(compiled, net, twin)
    if is_first_call:
        weight_cache.clear()
    for model in (net, twin):
        model.a.weight.data.mul_(1.5)
    original = getattr(module, function)
    failed: list[bool] = []

    def failing(*args: Any, **options: Any) -> Any:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("the device is full")
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, function, failing)
        try:
            out = compiled(inputs())
        except torch.OutOfMemoryError as error:
            assert "the device is full" in str(error)  # noqa: PT017
        else:
            assert_same(out, autocast(twin, inputs()))
    assert failed or not is_first_call  # later copies are written where the first ones lie
    for _ in range(2):
        EVAL.check(compiled, net, twin)
        assert_same(other_graph(inputs()), autocast(twin.a, inputs()))


@torch.no_grad()
def test_weights_that_move_after_a_refresh_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy was allocated, but not written, when the second allocation failed."""
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    EVAL.check(compiled, net, twin)
    weight_cache.clear()
    original, calls = torch.empty_strided, []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("the device is full")
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", failing)
        with pytest.raises(torch.OutOfMemoryError):
            compiled(inputs())
    for model in (net, twin):
        for param in model.parameters():
            param.data = param.data.clone().mul_(1.5)
    EVAL.check(compiled, net, twin)


class Deep(nn.Module):
    """Many weights, so that a collection falls between the making of two copies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(12))
        for i, parameter in enumerate(self.parameters()):
            parameter.data.copy_(other(i, *parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = functional.layer_norm(layer(x), x.shape[-1:])
        return x


@torch.no_grad()
def test_finalizers_run_while_copies_are_made() -> None:
    """Models die in collections, of which there is one at nearly every step of a call."""
    compiled = compile_amp_fx(lambda model, x: model(x))
    expected = autocast(Deep(SIZE), inputs())
    doomed = [Deep(SIZE) for _ in range(30)]
    for model in doomed:
        compiled(model, inputs())
    del model
    survivor = Deep(SIZE)
    num_collections = 0

    def kill(phase: str, _: Any) -> None:
        nonlocal num_collections
        num_collections += phase == "start"
        if phase == "start" and num_collections % 20 == 0 and doomed:
            doomed.pop()

    threshold = gc.get_threshold()
    gc.callbacks.append(kill)
    try:
        gc.set_threshold(1, 10_000, 10_000)  # the youngest objects only, which is cheap
        out = compiled(survivor, inputs())
        weight_cache.stats()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(kill)
    assert_same(out, expected)
    assert num_collections > 20


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")
def test_received_while_a_call_is_under_way(tmp_path: Path) -> None:
    """A broadcast takes the pointer, a call follows, and then the bytes come."""
    for found in run_ranks("tests.weights.broadcast_program", tmp_path, 2, "received"):
        assert found["received"]
