"""Frozen graphs on accelerators, the CPU being taken for one: writes, streams, captures."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx import weight_cache
from amp_fx.backend.cpp_compiler import has_cpp_compiler
from amp_fx.backend.lower import may_pack
from amp_fx.options import Options
from amp_fx.weights import write_signals
from amp_fx.weights.inputs import Inputs
from amp_fx.weights.store import STORE
from tests import needs
from tests.weights.accelerator_like import Accelerator, accelerator_like
from tests.weights.nets import EVAL, FrozenGraph, Graph, assert_same, inputs, make_net, twin_of
from tests.weights.test_cuda_like import LIST_WRITES, of_data
from tests.weights.writes import WRITES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fx.weights.cache_entry import CacheEntry
    from tests.weights.nets import Program

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a compiler")


@dataclasses.dataclass(frozen=True)
class Asked(FrozenGraph):
    """A graph that is frozen because that was asked for."""

    def compile(self, model: nn.Module, **options: Any) -> Program:
        return super().compile(model, **{"freezing": True, **options})


FROZEN = Asked("frozen")


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with accelerator_like(monkeypatch) as pretended:
        yield pretended


def constants() -> list[CacheEntry]:
    """Returns the cache entries of frozen graphs that are not aliases of weights."""
    entries = [e for e in STORE.entries.values() if not e.spec.is_alias]
    assert entries, "nothing is frozen"
    return entries


def plain_values() -> list[CacheEntry]:
    """The values that are inputs of the code: accelerators have no weights packed for oneDNN."""
    entries = [entry for entry in constants() if not entry.value.is_mkldnn]
    assert entries
    return entries


# -------------------------------------------------------------------------------- where and when


def graph_inputs(*tensors: torch.Tensor) -> Inputs:
    """Returns the inputs of a graph that has no weights."""
    return Inputs((), dict(enumerate(tensors)), (), frozenset())


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "is_frozen"),
    [
        ({}, True),
        ({"freezing": None}, False),
        ({"freezing": False}, False),
        ({"triton.cudagraphs": True}, False),
        ({"mode": "max-autotune"}, False),
    ],
    ids=str,
)
@needs.FROZEN_GRAPHS
def test_it_is_frozen_where_that_is_asked_for(options: dict[str, Any], is_frozen: bool) -> None:
    wanted = {"freezing": True, **options}
    parsed = Options.parse({name: v for name, v in wanted.items() if v is not None}, None)
    assert may_pack(parsed, graph_inputs(inputs())) == is_frozen


@needs.FROZEN_GRAPHS
def test_the_switch_of_inductor_asks_for_it() -> None:
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        assert may_pack(Options.parse({}, None), graph_inputs(inputs()))
        assert not may_pack(Options.parse({"freezing": False}, None), graph_inputs(inputs()))


@needs.FROZEN_GRAPHS
def test_graphs_on_several_devices_are_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    options = Options.parse({"freezing": True}, None)
    tensors = {d: torch.ones(2, device=d) for d in ("cpu", "meta")}
    number = torch.ones(())
    with torch.no_grad():
        assert may_pack(options, graph_inputs(tensors["cpu"], number))
        assert not may_pack(options, graph_inputs(*tensors.values()))
    assert graph_inputs(tensors["meta"], number).device_type == "meta"
    assert graph_inputs(number).device_type == "cpu"
    assert graph_inputs(*tensors.values()).device_type is None


# ---------------------------------------------------------------------------------------- writes

IN_PLACE = ["data_mul_", "data_replaced", "storage_copy_"]


@torch.no_grad()
@needs.FROZEN_GRAPHS
def test_never_stale_after_writes() -> None:
    """Those that CUDA's kernels do unseen among them, one after the other."""
    net = make_net()
    twin = twin_of(net)
    compiled = FROZEN.compile(net)
    FROZEN.check(compiled, net, twin)
    for name in IN_PLACE:
        steps = [WRITES[name](model) for model in (net, twin)]
        for i in range(2):
            for step in steps:
                step(i)
            FROZEN.check(compiled, net, twin)
    for i, name in enumerate(("_foreach_mul_", "_foreach_copy_", "_fused_adamw_", "_fused_sgd_")):
        for model in (net, twin):
            LIST_WRITES[name](of_data(model), i)
        FROZEN.check(compiled, net, twin)
        FROZEN.check(compiled, net, twin)
    assert min(entry.slot.hits for entry in constants()) >= 4


# --------------------------------------------------------------------------------------- streams


@torch.no_grad()
@needs.FROZEN_GRAPHS
def test_another_stream_waits_for_what_was_made_and_holds_it(accelerator: Accelerator) -> None:
    net = make_net()
    twin = twin_of(net)
    compiled = FROZEN.compile(net)
    FROZEN.check(compiled, net, twin)
    first, second = accelerator.streams
    made = first.recorded[-1]
    assert not accelerator.held, "one stream alone needs no holding"
    accelerator.current = second
    FROZEN.check(compiled, net, twin)
    assert made in second.waited
    assert all(accelerator.is_held(entry.value, second) for entry in plain_values())


@torch.no_grad()
@needs.FROZEN_GRAPHS
def test_what_another_stream_may_still_read_is_not_written(accelerator: Accelerator) -> None:
    net = make_net()
    compiled = FROZEN.compile(net)
    compiled(inputs())
    before = {entry: entry.value for entry in constants()}
    contents = {entry: value.to_dense().clone() for entry, value in before.items()}
    net.a.weight.mul_(2)
    accelerator.current = accelerator.streams[1]
    compiled(inputs())
    assert sum(entry.value is not value for entry, value in before.items()) == 1
    for entry, value in before.items():
        assert_same(value.to_dense(), contents[entry])


@torch.no_grad()
@needs.FROZEN_GRAPHS
def test_what_a_call_reads_is_held_though_another_thread_makes_it_again(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for what is fresh and the call: on the stream that made it."""
    net = make_net()
    twin = twin_of(net)
    compiled = FROZEN.compile(net)
    first, second = accelerator.streams
    for stream in (first, second):
        accelerator.current = stream
        FROZEN.check(compiled, net, twin)
    delivered = [entry.value for entry in constants()]
    accelerator.held.clear()
    wait = STORE.wait_for_refreshes

    def meanwhile(devices: Any) -> None:
        monkeypatch.setattr(STORE, "wait_for_refreshes", wait)
        accelerator.current = first
        net.a.weight.mul_(2)
        compiled(inputs())
        accelerator.current = second
        wait(devices)

    monkeypatch.setattr(STORE, "wait_for_refreshes", meanwhile)
    FROZEN.check(compiled, net, twin)
    assert not all(e.value is value for e, value in zip(constants(), delivered, strict=True))
    plain = [value for value in delivered if not value.is_mkldnn]
    assert plain
    assert all(accelerator.is_held(value, second) for value in plain)
    assert first.recorded[-1] in second.waited


# -------------------------------------------------------------------------------------- captures


@torch.no_grad()
@pytest.mark.parametrize("verify", ["sample", "full"])
@needs.FROZEN_GRAPHS
def test_a_capture_makes_its_values_itself(accelerator: Accelerator, verify: str) -> None:
    net = make_net()
    twin = twin_of(net)
    compiled = FROZEN.compile(net, verify=verify)
    FROZEN.check(compiled, net, twin)
    array, other = net.a.weight.numpy(), twin.a.weight.numpy()
    FROZEN.check(compiled, net, twin)
    refreshes, hits = weight_cache.stats().refreshes, weight_cache.stats().hits
    accelerator.is_capturing = True
    for _ in range(2):
        array *= 1.5  # as a replay finds it: no signal, and no Python that looks
        other *= 1.5
        FROZEN.check(compiled, net, twin)
    assert (weight_cache.stats().refreshes, weight_cache.stats().hits) == (refreshes, hits)


@torch.no_grad()
@pytest.mark.parametrize("graph", [FROZEN, EVAL], ids=lambda graph: graph.name)
def test_a_step_inside_of_a_cuda_graph_writes_in_every_replay(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    twin = twin_of(net)
    compiled = graph.compile(net, verify="off")
    graph.check(compiled, net, twin)
    arrays = [model.a.weight.numpy() for model in (net, twin)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(write_signals, "is_capturing", lambda _: True)
        write_signals.after_step(optimizer)
    for _ in range(3):
        for array in arrays:
            array.__imul__(1.5)
        graph.check(compiled, net, twin)
