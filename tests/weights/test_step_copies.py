"""Compiled optimizer steps that write kept copies: fresh for the next call, never wrong."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import amp_fx
from amp_fx import weight_cache
from amp_fx.weights import step_copies
from amp_fx.weights.entry import computing_values
from amp_fx.weights.step_copies import MAX_UNUSED, StepCopies
from amp_fx.weights.store import STORE
from tests import needs
from tests.weights.nets import (
    HALF,
    TRAIN,
    assert_same,
    autocast,
    compile_amp_fx,
    counted_refreshes,
    inputs,
    make_net,
    random,
    twin_of,
)
from tests.weights.specs import cast_spec
from tests.weights.test_random_sequences import PLAIN
from tests.weights.writes import WRITES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from amp_fx.weights.split import CachedValueSpec


class Step:
    """A compiled step of a model, with gradients made to order."""

    def __init__(self, net: nn.Module, *, has_scaler: bool, backend: Any = "eager") -> None:
        self.params = list(net.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=0.1)
        self.scaler = amp_fx.GradScaler("cpu", init_scale=4.0)
        given: dict[str, Any] = {"max_norm": 1.0, "backend": backend}
        self.has_scaler = has_scaler
        self.call: Callable[[], Any] = (
            self.scaler.compile_step(self.optimizer, **given)
            if has_scaler
            else amp_fx.compile_step(self.optimizer, **given)
        )
        self(0)  # which makes the optimizer's state

    def __call__(self, seed: int, *, bad: float | None = None) -> None:
        for param in self.params:
            param.grad = random(*param.shape, seed=seed)
        if bad is not None and self.has_scaler:
            self.params[0].grad[0, 0] = bad  # type: ignore[index]
        if self.has_scaler:
            self.scaler.scale(torch.ones(()))
        self.call()


def assert_copies_are_the_weights(net: nn.Module) -> int:
    """Of all that count as fresh; how many those are."""
    fresh = 0
    for param in net.parameters():
        for entry in STORE.of_weight(param):
            is_copy = getattr(entry.spec, "is_cast", False)
            if is_copy and entry.is_fresh():
                assert_same(entry.value, param.detach().to(entry.value.dtype))
                fresh += 1
    return fresh


def take_weights(twin: nn.Module, net: nn.Module) -> None:
    with torch.no_grad():
        for theirs, ours in zip(twin.parameters(), net.parameters(), strict=True):
            theirs.copy_(ours)


@needs.HOOK
@pytest.mark.parametrize("has_scaler", [True, False])
def test_the_next_call_finds_them_fresh(has_scaler: bool) -> None:
    net = make_net()
    twin = twin_of(net)
    trained, half = compile_amp_fx(net), compile_amp_fx(net, dtype=torch.float16)
    step = Step(net, has_scaler=has_scaler)
    take_weights(twin, net)
    for seed in range(1, 5):
        for graph, compiled in ((TRAIN, trained), (HALF, half)):
            graph.check(compiled, net, twin)
        step(seed)
        assert assert_copies_are_the_weights(net) == 2 * len(step.params)
        take_weights(twin, net)
        with counted_refreshes() as count:
            TRAIN.check(trained, net, twin)
            HALF.check(half, net, twin)
            assert count() == 0


@needs.HOOK
def test_a_skipped_step_changes_no_bit() -> None:
    net = make_net()
    twin = twin_of(net)
    with torch.no_grad():
        net.a.bias[0] = twin.a.bias[0] = -0.0
    compiled = compile_amp_fx(net)
    step = Step(net, has_scaler=True)
    take_weights(twin, net)
    TRAIN.check(compiled, net, twin)
    before = [p.detach().clone() for p in step.params]
    for bad in (float("inf"), float("nan")):
        step(1, bad=bad)
        assert step.scaler.last_step is not None
        assert step.scaler.last_step.skipped
        assert_same([p.detach() for p in step.params], before)
        with counted_refreshes() as count:
            TRAIN.check(compiled, net, twin)
            assert count() == 0


actions = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(PLAIN)),
    st.tuples(st.just("step"), st.sampled_from((None, None, float("inf"), float("nan")))),
    st.tuples(st.just("call"), st.integers(0, 1)),
    st.tuples(st.just("cache"), st.sampled_from(("clear", "invalidate"))),
)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example([("call", 0), ("step", None), ("write", "numpy_of_detached"), ("call", 0)])
@example([("call", 0), ("write", "data_mul_"), ("step", float("inf")), ("call", 0)])
@given(st.lists(actions, min_size=6, max_size=12))
def test_never_stale(sequence: list[tuple[str, Any]]) -> None:
    """Whatever else writes weights before and after a step, in any order."""
    torch._dynamo.reset()
    net = make_net()
    twin = twin_of(net)
    step = Step(net, has_scaler=True)
    take_weights(twin, net)
    graphs = (TRAIN, HALF)
    compiled = [compile_amp_fx(net, dtype=graph.dtype) for graph in graphs]
    for i, (kind, what) in enumerate(sequence):
        if kind == "call":
            graphs[what].check(compiled[what], net, twin)
        elif kind == "cache":
            getattr(weight_cache, what)()
        elif kind == "step":
            step(i, bad=what)
            take_weights(twin, net)
        else:
            for model in (net, twin):
                WRITES[what](model)(i)
        assert_copies_are_the_weights(net)
    for graph, program in zip(graphs, compiled, strict=True):
        graph.check(program, net, twin)


@needs.HOOK
def test_a_copy_that_a_backward_holds_is_left_alone() -> None:
    """Eager autocast holds a cast of its own there, too."""
    net = make_net()
    twin = twin_of(net)
    compiled = compile_amp_fx(net, compiler="aot_eager")  # whose backward reads kept copies
    step = Step(net, has_scaler=False)
    take_weights(twin, net)
    for _ in range(3):
        compiled(inputs()).sum().backward()  # type: ignore[no-untyped-call]
    assert assert_copies_are_the_weights(net) == len(step.params)
    x, expected_x = inputs(requires_grad=True), inputs(requires_grad=True)
    out, expected = compiled(x), autocast(twin, expected_x)
    step(1)
    (grad,) = torch.autograd.grad(out.sum(), x)
    (expected_grad,) = torch.autograd.grad(expected.sum(), expected_x)
    assert_same(grad, expected_grad)
    take_weights(twin, net)
    assert_same(compiled(inputs()), autocast(twin, inputs()))


@needs.HOOK
@pytest.mark.parametrize("how", ["in place", "by .data", "by the optimizer, in another thread"])
def test_a_write_in_the_midst_of_a_step_is_seen(how: str) -> None:
    net = make_net()
    twin = twin_of(net)
    others: list[Callable[[], None]] = []

    def interrupted(gm: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            outputs = gm(*args)
            for other in others:
                other()
            return outputs

        return run

    compiled = compile_amp_fx(net)
    step, again = Step(net, has_scaler=False, backend=interrupted), Step(net, has_scaler=False)
    take_weights(twin, net)
    TRAIN.check(compiled, net, twin)
    step(1)
    again(2)
    take_weights(twin, net)
    TRAIN.check(compiled, net, twin)

    def write() -> None:
        if how == "in place":
            with torch.no_grad():
                net.b.weight.mul_(2)
        elif how == "by .data":
            net.b.weight.data.mul_(2)
        else:
            thread = threading.Thread(target=again, args=(3,))
            thread.start()
            thread.join()

    others.append(write)
    step(4)
    assert_copies_are_the_weights(net)
    take_weights(twin, net)
    TRAIN.check(compiled, net, twin)


def test_where_weights_cannot_be_aliased_they_are_written_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_copies, "is_available", lambda: False)
    net = make_net()
    twin = twin_of(net)
    compiled = compile_amp_fx(net)
    step = Step(net, has_scaler=False)
    for seed in range(3):
        take_weights(twin, net)
        TRAIN.check(compiled, net, twin)
        step(seed)
        assert assert_copies_are_the_weights(net) == 0


# One step, by hand -------------------------------------------------------------------------------


def keep(weight: Tensor, *specs: CachedValueSpec) -> list[Any]:
    """Makes copies of a weight, as calls of graphs do."""
    with STORE.locked(), computing_values():
        entries: list[Any] = [
            STORE.entry(s, (weight,), "a test") for s in specs or [cast_spec(weight)]
        ]
        STORE.refresh(entries, [(weight,)] * len(entries))
    return entries


def step_of(*weights: Tensor) -> StepCopies:
    return StepCopies(torch.optim.SGD(weights))


def write(step: StepCopies, weights: Sequence[Tensor], value: float) -> Any:
    with torch.no_grad(), step.written(weights) as targets:
        for weight, lows in zip(targets.weights, targets.lows, strict=True):
            weight.fill_(value)
            for low in lows:
                low.copy_(weight)
    return targets


@needs.HOOK
def test_all_copies_of_a_weight_are_written_however_they_lie() -> None:
    weight = nn.Parameter(random(2, 3, 4, 5))
    lows = keep(
        weight,
        cast_spec(weight),
        cast_spec(weight, torch.float16),
        cast_spec(weight, memory_format=torch.channels_last),
    )
    write(step_of(weight), [weight], 3.0)
    assert weight.detach().eq(3).all()
    for copy in lows:
        assert copy.is_fresh()
        assert_same(copy.value, weight.detach().to(copy.value.dtype))
    assert lows[2].value.is_contiguous(memory_format=torch.channels_last)


@needs.HOOK
def test_compiled_steps_write_copies_that_are_laid_out_otherwise() -> None:
    """On a CPU those, a convolution's, are written after the update, by a function of their own."""
    conv = nn.Conv2d(4, 8, 3, bias=False)
    step = Step(conv, has_scaler=True)
    specs = [cast_spec(conv.weight, memory_format=form) for form in MEMORY_FORMATS]
    as_weight, turned = keep(conv.weight, *specs)
    for seed, bad in ((1, None), (2, float("inf")), (3, None)):
        before = conv.weight.detach().clone()
        step(seed, bad=bad)
        assert torch.equal(conv.weight, before) == (bad is not None)
        for copy in (as_weight, turned):
            assert copy.is_fresh()
            assert_same(copy.value, conv.weight.detach().to(torch.bfloat16))
    assert as_weight.value.is_contiguous()
    assert turned.value.is_contiguous(memory_format=torch.channels_last)


MEMORY_FORMATS = (torch.preserve_format, torch.channels_last)


@needs.HOOK
def test_views_of_one_buffer_are_written_each_at_its_place() -> None:
    flat = torch.zeros(12)
    weights = [nn.Parameter(flat[:4]), nn.Parameter(flat[4:].view(2, 4))]
    copies = [keep(weight)[0] for weight in weights]
    write(step_of(*weights), weights, 2.0)
    assert flat.eq(2).all()
    assert all(copy.is_fresh() for copy in copies)
    flat.mul_(2)  # by whom it belongs to
    assert not any(copy.is_fresh() for copy in copies)


@needs.HOOK
def test_a_copy_that_somebody_holds_is_replaced() -> None:
    weight = nn.Parameter(random(4))
    (copy,) = keep(weight)
    step = step_of(weight)
    address = copy.value.data_ptr()
    write(step, [weight], 2.0)
    assert copy.value.data_ptr() == address  # nobody does
    held = copy.value
    write(step, [weight], 5.0)
    assert held.eq(2).all()
    assert copy.value.eq(5).all()
    assert copy.is_fresh()


@needs.HOOK
def test_a_step_that_fails_leaves_no_copy_fresh() -> None:
    weight = nn.Parameter(random(4))
    (copy,) = keep(weight)
    write(step_of(weight), [weight], 2.0)

    def fail() -> None:
        with torch.no_grad(), step_of(weight).written([weight]) as targets:
            targets.weights[0].fill_(3.0)
            raise RuntimeError("in the midst")

    with pytest.raises(RuntimeError, match="in the midst"):
        fail()
    assert not copy.is_fresh()


@needs.HOOK
def test_autograd_knows_that_the_weight_was_written() -> None:
    weight = nn.Parameter(random(4))
    keep(weight)
    loss = weight.square().sum()
    write(step_of(weight), [weight], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@needs.HOOK
def test_a_copy_that_no_call_takes_is_written_no_more() -> None:
    weight = nn.Parameter(random(4))
    (copy,) = keep(weight)
    step = step_of(weight)
    for i in range(MAX_UNUSED + 1):
        write(step, [weight], float(i))
        assert copy.is_fresh()
    assert write(step, [weight], 9.0).lows == [[]]
    assert not copy.is_fresh()
