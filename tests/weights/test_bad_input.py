"""Misuse of weights and programs gives right numbers or one clear error, and no crash."""

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
from amp_fx.weights import store
from amp_fx.weights.watch import is_available
from tests.weights.machine import run_all
from tests.weights.nets import (
    EVAL,
    SIZE,
    TRAIN,
    Graph,
    Net,
    assert_same,
    autocast,
    compile_amp_fx,
    gradients,
    inputs,
    make_net,
)
from tests.weights.writes import other

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Change = Callable[[Net], Any]

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 200


class Subclass(torch.Tensor):
    """Tensor subclass that changes nothing."""


def becomes_subclass(net: Net) -> None:
    weight = net.a.weight.detach().mul(1.5).as_subclass(Subclass)
    net.a.weight = nn.Parameter(weight, requires_grad=True)


def becomes_plain_again(net: Net) -> None:
    becomes_subclass(net)
    net.a.weight = nn.Parameter(net.a.weight.detach().as_subclass(torch.Tensor).clone())


def to_meta_and_back(net: Net) -> None:
    values = {name: value.mul(1.5) for name, value in net.state_dict().items()}
    net.to("meta").to_empty(device="cpu")
    net.load_state_dict(values)


def to_float64_and_back(net: Net) -> None:
    net.double()
    net.a.weight.data.mul_(1.5)
    net.float()


def storage_resized(net: Net) -> None:
    """As sharded training frees and allocates it between layers."""
    storage = net.a.weight.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(num_bytes)
    net.a.weight.data.copy_(other(1))


def storage_grown(net: Net) -> None:
    storage = net.a.weight.untyped_storage()
    storage.resize_(2 * storage.nbytes())
    net.a.weight.data.mul_(1.5)


def set_to_another(net: Net) -> None:
    with torch.no_grad():
        net.a.weight.set_(other(2))  # type: ignore[call-overload]


def set_to_a_part(net: Net) -> None:
    flat = other(3, 3 * SIZE, SIZE)
    with torch.no_grad():
        net.a.weight.set_(flat.untyped_storage(), SIZE, (SIZE, SIZE), (SIZE, 1))


def resized_and_written(net: Net) -> None:
    with torch.no_grad():
        net.a.weight.data.resize_(2 * SIZE, SIZE)
        net.a.weight.data.resize_(SIZE, SIZE)
        net.a.weight.data.copy_(other(4))


def grown_layer(net: Net) -> None:
    """Other sizes under the same parameter."""
    net.a.weight.data = other(5, 2 * SIZE, SIZE)
    net.a.bias.data = other(6, 2 * SIZE)
    net.b.weight.data = other(7, SIZE, 2 * SIZE)


CHANGES: dict[str, Change] = {
    f.__name__: f
    for f in (
        becomes_subclass,
        becomes_plain_again,
        to_meta_and_back,
        to_float64_and_back,
        storage_resized,
        storage_grown,
        set_to_another,
        set_to_a_part,
        resized_and_written,
        grown_layer,
    )
}


RESIZED = ("storage_resized", "storage_grown", "resized_and_written")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("graph", [TRAIN, EVAL], ids=lambda graph: graph.name)
def test_weights_that_change_what_they_are(change: str, graph: Graph) -> None:
    if change in RESIZED and not is_available():
        pytest.skip("torch: resizing a copy-on-write storage leaves its materializer behind")
    net, twin = make_net(), make_net()
    compiled = graph.compile(net)
    for _ in range(2):
        graph.check(compiled, net, twin)
    for _ in range(2):
        for model in (net, twin):
            CHANGES[change](model)
        for _ in range(2):
            graph.check(compiled, net, twin)


@torch.no_grad()
@pytest.mark.parametrize("disturb", [weight_cache.clear, weight_cache.invalidate, gc.collect])
def test_the_cache_is_disturbed_during_calls(disturb: Callable[[], Any]) -> None:
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    expected = autocast(twin, inputs())
    assert_same(compiled(inputs()), expected)
    done = threading.Event()

    @torch.no_grad()
    def reader() -> None:
        try:
            for _ in range(ROUNDS):
                assert_same(compiled(inputs()), expected)
        finally:
            done.set()

    def disturber() -> None:
        while not done.wait(0.0002):
            disturb()
            weight_cache.stats()

    run_all(reader, reader, disturber)
    EVAL.check(compiled, net, twin)


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

WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset
from tests.weights.nets import EVAL, TRAIN, compile_amp_fx, make_net
net, twin = make_net(), make_net()
compiled = compile_amp_fx(net)
EVAL.check(compiled, net, twin)

class Features(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        net.a.weight.data.mul_(2.0)
        twin.a.weight.data.mul_(2.0)
        EVAL.check(compiled, net, twin)
        return net.a.weight.detach().sum()

if __name__ == "__main__":
    for batch in DataLoader(Features(), num_workers=2, multiprocessing_context="fork"):
        TRAIN.check(compiled, net, twin)
        for model in (net, twin):
            model.b.weight.data.mul_(1.5)
        EVAL.check(compiled, net, twin)
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
    [
        pytest.param(FORK, id="fork"),
        pytest.param(WORKERS, id="workers"),
        pytest.param(WRITING, id="writing", marks=pytest.mark.slow),
    ],
)
def test_processes_that_fork(program: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", program]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # libgomp's threads do not survive a fork
    done = subprocess.run(
        command, cwd=ROOT, env=one_thread, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


ALLOCATING = [(torch, "empty_strided"), (store, "foreach_copy_")]


@pytest.mark.parametrize(("module", "function"), ALLOCATING, ids=["empty_strided", "foreach_copy_"])
@pytest.mark.parametrize("is_first_call", [True, False])
@torch.no_grad()
def test_out_of_memory_in_a_refresh(
    module: Any, function: str, is_first_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be raised, as it is, or done without; the next call is right in any case."""
    net, twin = make_net(), make_net()
    compiled, other_graph = compile_amp_fx(net), compile_amp_fx(net.a)
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


@pytest.fixture
def _short_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


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


@torch.no_grad()
@pytest.mark.usefixtures("_short_switches")
def test_a_thread_drops_models_while_another_makes_copies() -> None:
    compiled = compile_amp_fx(lambda model, x: model(x))
    expected = autocast(Deep(SIZE), inputs())
    models = [Deep(SIZE) for _ in range(60)]
    for model in models:
        compiled(model, inputs())
    del model
    done = threading.Event()

    def dropper() -> None:
        while models and not done.wait(0.0005):
            models.pop()
            weight_cache.stats()

    @torch.no_grad()
    def caller() -> None:
        try:
            for _ in range(30):
                assert_same(compiled(Deep(SIZE), inputs()), expected)
        finally:
            done.set()

    run_all(dropper, caller)


@torch.no_grad()
@pytest.mark.parametrize(("module", "function"), ALLOCATING, ids=["empty_strided", "foreach_copy_"])
def test_models_die_at_every_allocation_of_a_copy(
    module: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finalizers of dead weights run in the middle of whatever the cache is at."""
    compiled = compile_amp_fx(lambda model, x: model(x))
    expected = autocast(Deep(SIZE), inputs())
    doomed = [Deep(SIZE) for _ in range(8)]
    for model in doomed:
        compiled(model, inputs())
    del model
    original, survivor = getattr(module, function), Deep(SIZE)

    def dropping(*args: Any, **options: Any) -> Any:
        if doomed:
            doomed.pop()
        return original(*args, **options)

    monkeypatch.setattr(module, function, dropping)
    assert_same(compiled(survivor, inputs()), expected)
    assert len(doomed) < 8, "the function is not called at all"


def scaled(net: Net) -> None:
    for parameter in net.parameters():
        parameter.data.mul_(1.5)


def swapped_average(net: Net) -> None:
    for i, parameter in enumerate(net.parameters()):
        parameter.data.copy_(other(i, *parameter.shape))


def replaced_data(net: Net) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data * 1.5


def listed(net: Net) -> None:
    torch._foreach_mul_([p.data for p in net.parameters()], 1.5)


@pytest.mark.parametrize("change", [scaled, swapped_average, replaced_data, listed])
@pytest.mark.parametrize("second", [TRAIN, EVAL], ids=lambda graph: graph.name)
def test_a_backward_after_another_call_on_other_weights(change: Change, second: Graph) -> None:
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net, compiler="aot_eager")
    for _ in range(2):
        firsts = compiled(inputs()), autocast(twin, inputs())
        for model in (net, twin):
            change(model)
        second.check(compiled, net, twin)
        mine, theirs = (gradients(out, m) for out, m in zip(firsts, (net, twin), strict=True))
        assert_same(mine, theirs)
        second.check(compiled, net, twin)


def test_an_average_swapped_in_and_out_between_forward_and_backward() -> None:
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net, compiler="aot_eager")
    for _ in range(2):
        firsts = compiled(inputs()), autocast(twin, inputs())
        kept = [p.detach().clone() for p in net.parameters()]
        for model in (net, twin):
            swapped_average(model)
        EVAL.check(compiled, net, twin)
        for model in (net, twin):
            torch._foreach_copy_([p.data for p in model.parameters()], kept)
        mine, theirs = (gradients(out, m) for out, m in zip(firsts, (net, twin), strict=True))
        assert_same(mine, theirs)
        TRAIN.check(compiled, net, twin)
