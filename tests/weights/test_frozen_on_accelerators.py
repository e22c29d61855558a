"""Frozen graphs on accelerators, the CPU being taken for one: writes and captures."""

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
from tests.weights.cuda_like import write_list
from tests.weights.nets import EVAL, FrozenGraph, Graph, inputs, make_net, twin_of
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
        ({"cpp_wrapper": True}, False),
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
    for name in ("_foreach_mul_.Scalar", "_foreach_copy_", "_fused_adamw_", "_fused_sgd_"):
        for model in (net, twin):
            write_list(f"aten::{name}", [p.data for p in model.parameters()])
        FROZEN.check(compiled, net, twin)
        FROZEN.check(compiled, net, twin)
    assert min(entry.slot.hits for entry in constants()) >= 4


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
