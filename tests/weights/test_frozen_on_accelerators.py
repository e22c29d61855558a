"""Frozen graphs on accelerators, the CPU being taken for one: writes, streams, captures."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx import freezing, weight_cache
from amp_fx.inner import has_cpp_compiler
from amp_fx.options import Options
from amp_fx.weights import element_sample, frozen_call, write_signals
from amp_fx.weights.cast_plan import Plan
from amp_fx.weights.kept_cast import Slot
from amp_fx.weights.kept_copies import CACHE
from tests import needs
from tests.weights.accelerator_like import CPU, Accelerator, accelerator_like
from tests.weights.alarms import alarms
from tests.weights.nets import EVAL, Graph, assert_same, inputs, make_net, random, twin_of
from tests.weights.test_cuda_like import LIST_WRITES, of_data
from tests.weights.test_frozen_writes import FrozenGraph, check_made_again
from tests.weights.test_writes import check_never_stale
from tests.weights.writes import WRITES

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    monkeypatch.setattr(frozen_call, "MAX_UNUSED", 10**6)
    weight_cache.clear()
    with accelerator_like(monkeypatch) as pretended:
        yield pretended


def kept_values() -> list[Any]:
    return [values for values in CACHE.values if not values.is_dropped]


# -------------------------------------------------------------------------------- where and when


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
    assert freezing.is_wanted(parsed, [inputs()]) == is_frozen


@needs.FROZEN_GRAPHS
def test_the_switch_of_inductor_asks_for_it() -> None:
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        assert freezing.is_wanted(Options.parse({}, None), [inputs()])
        assert not freezing.is_wanted(Options.parse({"freezing": False}, None), [inputs()])


@needs.FROZEN_GRAPHS
def test_graphs_on_several_devices_are_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    options = Options.parse({"freezing": True}, None)
    tensors = {d: torch.ones(2, device=d) for d in ("cpu", "meta")}
    number = torch.ones(())
    with torch.no_grad():
        assert freezing.is_wanted(options, [tensors["cpu"], number])
        assert not freezing.is_wanted(options, list(tensors.values()))
    assert freezing._device_type_of([tensors["meta"], number]) == "meta"
    assert freezing._device_type_of([number]) == "cpu"
    assert freezing._device_type_of(list(tensors.values())) is None


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
    assert sum(values.hits for values in kept_values()) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES)
def test_never_stale(write: str) -> None:
    check_never_stale(write, (FROZEN, EVAL))


@pytest.mark.parametrize(
    "name", ["attention", pytest.param("convolutions", marks=pytest.mark.slow)]
)
@needs.FROZEN_GRAPHS
def test_whatever_is_made_of_weights_is_made_again(name: str) -> None:
    check_made_again(name, FROZEN)


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
    (values,) = kept_values()
    constants = {id(value) for value in values.constants.values()}
    assert constants <= {identity for identity, stream in accelerator.held if stream == 1}


@torch.no_grad()
@needs.FROZEN_GRAPHS
def test_what_another_stream_may_still_read_is_not_written(accelerator: Accelerator) -> None:
    net = make_net()
    compiled = FROZEN.compile(net)
    compiled(inputs())
    (values,) = kept_values()
    before = dict(values.constants)
    contents = {name: value.to_dense().clone() for name, value in before.items()}
    net.a.weight.mul_(2)
    accelerator.current = accelerator.streams[1]
    compiled(inputs())
    replaced = [name for name, value in before.items() if values.constants[name] is not value]
    assert len(replaced) == 1
    for name, value in before.items():
        assert_same(value.to_dense(), contents[name])


def test_a_refresh_between_a_look_and_the_call_is_waited_for(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept casts: another thread refreshes on its stream when this one has begun to look."""
    monkeypatch.setattr("amp_fx.weights.cast_plan.accelerator_devices", lambda _: (CPU,))
    weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    plan = Plan(
        [Slot(1, torch.bfloat16, "weight")],
        owner="Net",
        passed=(0,),
        is_pure=True,
        verify="off",
        on_accelerator=True,
    )
    call = plan.wrap(lambda x, low: x @ low.float())
    first, second = accelerator.streams
    call(torch.ones(4), weight)
    accelerator.current = second
    call(torch.ones(4), weight)

    def by_another_thread() -> None:
        monkeypatch.setattr(plan, "_read_sample", lambda: None)
        accelerator.current = first
        weight.mul_(2)
        call(torch.ones(4), weight)
        accelerator.current = second

    monkeypatch.setattr(plan, "_read_sample", by_another_thread)
    assert call(torch.ones(4), weight).tolist() == [8.0] * 4
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
    monkeypatch.setattr(frozen_call, "is_alone", lambda: False)
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


# --------------------------------------------------------------------------------------- samples


@torch.no_grad()
def test_an_unseen_write_is_noticed_later_and_the_weight_named(accelerator: Accelerator) -> None:
    net = make_net()
    twin = twin_of(net)
    compiled = FROZEN.compile(net)
    array = net.a.weight.numpy()
    for _ in range(3):
        FROZEN.check(compiled, net, twin)
        accelerator.device.finish()
    with alarms() as messages:
        array *= -2.0
        twin.a.weight.mul_(-2.0)
        for _ in range(3):
            compiled(inputs())
            accelerator.device.finish()
        for _ in range(2):
            FROZEN.check(compiled, net, twin)
            array += 1.0
            twin.a.weight.add_(1.0)
    assert len(messages) == 1
    assert "a.weight" in messages[0]


@torch.no_grad()
def test_a_write_that_is_seen_is_no_alarm(accelerator: Accelerator) -> None:
    net = make_net()
    twin = twin_of(net)
    compiled = FROZEN.compile(net)
    with alarms() as messages:
        for _ in range(5):
            FROZEN.check(compiled, net, twin)
            FROZEN.check(compiled, net, twin)
            for model in (net, twin):
                torch._foreach_mul_(of_data(model), 1.5)
            accelerator.device.finish()
    assert not messages


@torch.no_grad()
def test_other_elements_are_compared_after_a_while(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One element that is written again and again is found sooner or later."""
    monkeypatch.setattr(element_sample, "MAX_CHECKS", 1)
    net = make_net()
    compiled = FROZEN.compile(net)
    array = net.b.weight.numpy()
    with alarms() as messages:
        for _ in range(400):  # of 16 elements: to miss it takes 1e-11
            array[1, 2] += 1.0
            compiled(inputs())
            accelerator.device.finish()
            if messages:
                break
    assert "b.weight" in messages[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_elements(dtype: torch.dtype) -> None:
    sample = element_sample.ElementSample(has_kernel=False)
    weights = {
        0: random(4, 3).to(dtype).t(),
        3: torch.ones(6, dtype=dtype)[::2],
        5: torch.full((), float("nan"), dtype=dtype),
        6: torch.ones(0, dtype=dtype),
        7: torch.ones(3, dtype=torch.int32),
    }
    elements = sample.elements_of(weights)
    assert set(elements.now) == {0, 5}
    assert elements.changed() == []
    weights[0].add_(1)
    assert elements.changed() == [0]
    elements.choose()
    assert elements.changed() == []
    for now, then in zip(*elements.pairs(), strict=True):
        assert_same(now.to(then.dtype), then)
