"""Samples of weights on accelerators, the CPU being taken for one: answers come later."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import weight_cache
from amp_fx.weights.call import CachedCall
from amp_fx.weights.engine import engine
from amp_fx.weights.sample import (
    CALLS_BETWEEN,
    FIRST_CALLS,
    MAX_SAMPLED,
    MIN_SAMPLED,
    SampledEntries,
    _Grid,
)
from amp_fx.weights.step_copies import StepCopies
from amp_fx.weights.store import STORE
from tests import needs
from tests.weights.accelerator_like import Accelerator, accelerator_like
from tests.weights.alarms import alarms
from tests.weights.specs import cast_spec
from tests.weights.strided import STRIDED, read_by, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = needs.WATCH


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with accelerator_like(monkeypatch) as pretended:
        yield pretended


def weight_of(*shape: int, value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, value), requires_grad=False)


def _sums(lows: list[torch.Tensor]) -> list[float]:
    return [low.double().sum().item() for low in lows]


class Scene:
    """A graph that sums the casts of some weights, and arrays of those from before the first call.

    Args:
        weights: Those that it is called with; the graph takes as many.
        settings: What else ``CachedCall`` takes.
    """

    def __init__(self, accelerator: Accelerator, *weights: torch.Tensor, **settings: Any) -> None:
        self.accelerator = accelerator
        self.weights = list(weights)
        known = any(STORE.of_weight(weight) for weight in weights)  # an array would make it stale
        self.arrays = [] if known else [weight.numpy() for weight in weights]
        specs = [cast_spec(w, position=i, name=f"w{i}") for i, w in enumerate(weights)]
        chosen = {"owner": "Net", "verify": "sample", "compiled": _sums, **settings}
        self.kept = CachedCall(specs, (), **chosen)

    def call(self, *weights: torch.Tensor) -> list[float]:
        """The sums, once all that was queued before was done."""
        self.accelerator.finish()
        sums: list[float] = self.kept([*(weights or self.weights)])
        return sums

    def expected(self) -> list[float]:
        """What a call gives that finds nothing stale."""
        return [weight.bfloat16().double().sum().item() for weight in self.weights]

    def warm(self, num_calls: int = FIRST_CALLS + 3) -> None:
        for _ in range(num_calls):
            assert self.call() == self.expected()

    def calls_until_right(self, most: int = 3 * CALLS_BETWEEN) -> int:
        """How many calls gave what is stale."""
        return next((i for i in range(most) if self.call() == self.expected()), most)


# ----------------------------------------------------------------------------- what it notices


@pytest.mark.parametrize("num_calls", [1, 2, FIRST_CALLS + 2, 2 * CALLS_BETWEEN + 1])
def test_a_write_of_a_whole_weight_is_found_in_time(
    accelerator: Accelerator, num_calls: int
) -> None:
    scene = Scene(accelerator, weight_of(4, 4), weight_of(1), weight_of(3, 70))
    with alarms() as messages:
        scene.warm(num_calls)
        assert not messages
        scene.arrays[2][:] = 2.0
        assert scene.calls_until_right() <= CALLS_BETWEEN
    (message,) = messages
    assert "w2 of Net" in message


def test_each_weight_is_told_of_once_and_then_made_on_every_call(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4), weight_of(5))
    with alarms() as messages:
        for array in scene.arrays:
            scene.warm()
            array[:] = 2.0
            assert scene.calls_until_right() <= CALLS_BETWEEN
            for value in (3.0, 5.0):  # of one element: nobody hopes for a sample any more
                array[1] = value
                assert scene.call() == scene.expected()
    assert [message[:2] for message in messages] == ["w0", "w1"]


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 100, 127, 128, 191, 1000, 4097])
def test_a_part_in_one_piece_is_always_found(accelerator: Accelerator, numel: int) -> None:
    """A 64th of the weight, wherever it lies."""
    length = -(-numel // MIN_SAMPLED)
    for begin in (*range(0, numel - length, max(1, numel // 9)), numel - length):
        scene = Scene(accelerator, weight_of(numel))
        with alarms():
            scene.warm(FIRST_CALLS)
            scene.arrays[0][begin : begin + length] = 64.0
            assert scene.calls_until_right() <= CALLS_BETWEEN, begin


@pytest.mark.parametrize("side", [64, 256, 1000])
def test_columns_are_found_as_well_as_rows(accelerator: Accelerator, side: int) -> None:
    """Elements are not all in one column, whatever the width: half the columns are found."""
    num_missed = 0
    for seed in range(40):
        scene = Scene(accelerator, weight_of(side, side))
        half = slice(side // 2, None) if seed % 2 else slice(0, side // 2)
        with alarms():
            scene.warm(FIRST_CALLS)
            scene.arrays[0][:, half] = 2.0
            num_missed += scene.calls_until_right() > CALLS_BETWEEN
    assert num_missed < 10


def test_odd_numbers_are_no_alarm_and_every_bit_counts(accelerator: Accelerator) -> None:
    odd = nn.Parameter(torch.tensor([float("nan"), -0.0, 1e38, 1e-44, 1.0]), requires_grad=False)
    scene = Scene(accelerator, odd)
    with alarms() as messages:
        for _ in range(3 * CALLS_BETWEEN):
            scene.call()
        assert not messages
        scene.arrays[0][1] = 0.0
        for _ in range(CALLS_BETWEEN + 1):
            scene.call()
    assert len(messages) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_dtypes_and_layouts(accelerator: Accelerator, dtype: torch.dtype) -> None:
    behind = torch.ones(40, dtype=dtype)[8:]
    for tensor in (torch.ones(3, 5, dtype=dtype).t(), behind, torch.ones((), dtype=dtype)):
        empty = weight_of(0)  # cannot be compared
        scene = Scene(accelerator, nn.Parameter(tensor, requires_grad=False), empty)
        with alarms() as messages:
            scene.warm()
            scene.arrays[0][...] = 2.0
            assert scene.calls_until_right() <= CALLS_BETWEEN
        assert len(messages) == 1


@pytest.mark.parametrize("kind", STRIDED)
def test_a_weight_with_gaps_or_an_expanded_one(accelerator: Accelerator, kind: str) -> None:
    """A write to the whole weight is found, one that it does not read is no alarm."""
    big = whole_of()
    whole, is_read = big.numpy(), read_by(kind)
    scene = Scene(accelerator, nn.Parameter(STRIDED[kind](big), requires_grad=False))
    with alarms() as messages:
        scene.warm()
        whole[~is_read] += 5.0
        scene.warm(CALLS_BETWEEN)
        assert not messages
        whole[is_read] += 2.0
        assert scene.calls_until_right() <= CALLS_BETWEEN
    assert len(messages) == 1


@pytest.mark.parametrize("kind", STRIDED)
def test_as_many_distinct_elements_as_it_takes(kind: str) -> None:
    tensor = STRIDED[kind](whole_of())
    distinct = torch.as_tensor(sorted(set(tensor.flatten().tolist())))
    for _ in range(50):
        found = _Grid.over(tensor).of(tensor)
        assert min(distinct.numel(), MIN_SAMPLED) <= found.numel() <= MAX_SAMPLED
        assert len(set(found.tolist())) == found.numel()
        assert torch.isin(found, distinct).all()


# ------------------------------------------------------------------------------ what it costs


def num_comparisons(call: Callable[[], Any]) -> int:
    with torch.profiler.profile() as profile:
        for _ in range(4 * CALLS_BETWEEN):
            call()
    counts = {event.key: event.count for event in profile.key_averages()}
    return int(counts["amp_fx::sample"])


def test_calls_compare_now_and_then_if_the_latest_comparison_is_done(
    accelerator: Accelerator,
) -> None:
    scene = Scene(accelerator, weight_of(4, 4))
    scene.call()
    assert num_comparisons(scene.call) == FIRST_CALLS + 3
    scene = Scene(accelerator, weight_of(4, 4))
    scene.call()
    for _ in range(2):
        assert num_comparisons(lambda: scene.kept([*scene.weights])) == 1
        accelerator.finish()


def test_an_answer_is_read_when_it_is_there(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4))
    scene.warm(1)
    scene.arrays[0][:] = 2.0
    with alarms() as messages:
        for _ in range(3):
            assert scene.kept([*scene.weights]) == [16.0]
        ((target, source),) = accelerator.copies
        target[:-1] = source[:-1]  # has arrived in part
        assert scene.kept([*scene.weights]) == [16.0]
        assert not messages
        assert scene.call() == [32.0]
    assert len(messages) == 1


@pytest.mark.parametrize("verify", ["off", "full"])
def test_other_ways_to_verify_do_not_sample(accelerator: Accelerator, verify: str) -> None:
    scene = Scene(accelerator, weight_of(4, 4), verify=verify)
    with torch.profiler.profile() as profile:
        scene.warm()
    assert "amp_fx::sample" not in {event.key for event in profile.key_averages()}


def test_full_verification_waits_for_other_streams(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4), verify="full")
    scene.call()
    accelerator.current = accelerator.streams[1]
    scene.arrays[0][:] = 2.0
    with pytest.raises(amp_fx.errors.StaleWeightError):
        scene.call()
    assert accelerator.streams[0].recorded[-1] in accelerator.streams[1].waited


def test_sampling_is_no_write_and_leaves_states_of_the_user_alone(accelerator: Accelerator) -> None:
    torch.manual_seed(1)
    random.seed(1)
    states = torch.get_rng_state(), random.getstate()
    scene = Scene(accelerator, weight_of(8)[3:], weight_of(100, 100))
    with torch.device("meta"):
        scene.warm()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert weight_cache.stats().refreshes == 2
    assert all(engine().watched(weight) for weight in scene.weights)


# ----------------------------------------------------- values that are made again, or by others


def test_a_seen_write_is_no_alarm(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4), weight_of(4))
    with alarms() as messages:
        for i in range(100):
            assert scene.call() == scene.expected()
            if i % 3 == 0:
                scene.weights[i % 2].add_(1.0)
            elif i % 7 == 0:
                torch._foreach_mul_([weight.data for weight in scene.weights], 1.5)
    assert not messages


def test_an_answer_about_a_value_that_was_made_again_is_dropped(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4))
    with alarms() as messages:
        scene.warm(1)
        scene.arrays[0][:] = 2.0
        assert scene.call() == [16.0], "it starts the comparison that tells"
        scene.weights[0].add_(1.0)
        assert scene.kept([*scene.weights]) == [48.0], "which is not done before this call"
        num_refreshes = weight_cache.stats().refreshes
        scene.warm(3)
        assert weight_cache.stats().refreshes == num_refreshes
    assert not messages


def test_an_update_of_one_weight_hides_no_write_of_another(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4), weight_of(4))
    with alarms() as messages:
        scene.warm()
        scene.arrays[0][:] = 2.0
        are_right = []
        for _ in range(CALLS_BETWEEN + 1):
            scene.weights[1].add_(1.0)
            are_right.append(scene.call() == scene.expected())
        assert are_right[-1]
        assert not are_right[0]
    (message,) = messages
    assert "w0" in message


def test_a_graph_that_finds_values_made_compares_them(accelerator: Accelerator) -> None:
    """As where Dynamo compiles again for other shapes: the first graph is called no more."""
    first = Scene(accelerator, weight_of(4, 4))
    first.call()
    second = Scene(accelerator, *first.weights)
    with alarms() as messages:
        second.warm()
        assert weight_cache.stats().refreshes == 1
        first.arrays[0][:] = 2.0
        assert second.calls_until_right() <= CALLS_BETWEEN
        assert first.call() == first.expected()
    assert len(messages) == 1


@pytest.mark.parametrize("verify", ["sample", "off"])
def test_values_that_another_graph_makes_again_are_no_alarm(
    accelerator: Accelerator, verify: str
) -> None:
    first = Scene(accelerator, weight_of(4, 4))
    second = Scene(accelerator, *first.weights, verify=verify)
    with alarms() as messages:
        for _ in range(2 * CALLS_BETWEEN):
            first.weights[0].mul_(1.5)
            for scene in (second, first, first):
                assert scene.call() == scene.expected()
        assert not messages
        first.arrays[0][:] = 2.0
        assert first.calls_until_right() <= CALLS_BETWEEN
    assert len(messages) == 1


def test_copies_that_an_optimizer_writes_are_no_alarm(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4))
    step = StepCopies(torch.optim.SGD(scene.weights))
    with alarms() as messages:
        scene.warm()
        for _ in range(4):
            with step.written(scene.weights) as targets:
                targets.weights[0].mul_(1.5)
                for low in targets.lows[0]:
                    low.copy_(targets.weights[0])
            assert targets.lows[0], "nothing is tested"
            scene.warm(3)
        assert not messages
        with step.written(scene.weights) as targets:
            targets.weights[0].mul_(1.5)
            targets.lows[0][0].copy_(targets.weights[0])
        # Right after a step that wrote copies, too.
        scene.arrays[0][:] = 2.0
        assert scene.calls_until_right() <= CALLS_BETWEEN
    assert len(messages) == 1


def test_a_write_is_found_behind_a_weight_that_never_changes(accelerator: Accelerator) -> None:
    """And after training that used each value once."""
    scene = Scene(accelerator, weight_of(4, 4), weight_of(3, 3))
    with alarms() as messages:
        for _ in range(FIRST_CALLS + 3):
            scene.weights[1].mul_(1.5)
            scene.call()
        scene.warm(2)
        assert not messages
        scene.arrays[1][:] = 2.0
        assert scene.calls_until_right() <= CALLS_BETWEEN
    assert len(messages) == 1


def test_values_that_are_dropped_or_made_stale_are_no_alarm(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4))
    with alarms() as messages:
        for forget in (weight_cache.clear, weight_cache.invalidate):
            scene.warm()
            scene.arrays[0][:] *= 2.0
            forget()
            scene.warm()
        scene.warm(1)
        scene.call()
        scene.weights[0].data = torch.full((2, 2), 7.0)
        scene.warm()
    assert not messages


# ---------------------------------------------------------------------- layers that share a graph


def test_layers_that_share_a_graph_are_all_compared(accelerator: Accelerator) -> None:
    layers = [weight_of(4, 4) for _ in range(12)]
    arrays = [layer.numpy() for layer in layers]
    scene = Scene(accelerator, layers[0])
    with alarms() as messages:
        for _ in range(CALLS_BETWEEN + 3):
            for layer in layers:
                assert scene.call(layer) == [16.0]
        for array in arrays:
            array[:] = 2.0
        for _ in range(CALLS_BETWEEN):
            for layer in layers:
                scene.kept([layer])  # the host runs far ahead
        accelerator.finish()
        assert [scene.call(layer) for layer in layers] == [[32.0]] * len(layers)
    assert len(messages) == len(layers)


def test_a_weight_is_named_by_the_layer_that_was_compared(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4))
    other = weight_of(2, 3)
    with alarms() as messages:
        for _ in range(3):
            scene.call()
            scene.call(other)
        scene.arrays[0][:] = 2.0
        for _ in range(CALLS_BETWEEN + 1):
            scene.call()
            assert scene.call(other) == [6.0]
        assert scene.call() == [32.0]
    (message,) = messages
    assert "shape (4, 4)" in message


# ----------------------------------------------------------------------------- keep, and graphs


def test_keep_is_sampled(accelerator: Accelerator) -> None:
    weights = [weight_of(4, 4), weight_of(4, 4)]
    arrays = [weight.numpy() for weight in weights]
    kept = amp_fx.keep(lambda a, b: torch.cat([a, b]), *weights)
    with alarms() as messages:
        for _ in range(FIRST_CALLS):
            accelerator.finish()
            assert kept().sum() == 32.0
        arrays[1][:] = 2.0
        for _ in range(CALLS_BETWEEN + 1):
            accelerator.finish()
            kept()
        assert kept().sum() == 48.0
    assert "weight 1" in messages[0]


# ---------------------------------------------------------------------------- lifetimes, threads


def test_a_weight_that_died_is_not_asked(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4), weight_of(4))
    with alarms() as messages:
        scene.warm(1)
        for array in scene.arrays:
            array[:] = 2.0
        scene.kept([*scene.weights])
        gone = weakref.ref(scene.weights.pop(0))
        scene.arrays.clear()
        gc.collect()
        assert gone() is None, "something holds the weight"
        assert scene.call(weight_of(4, 4), scene.weights[0]) == [16.0, 8.0]
    (message,) = messages
    assert "w1" in message


def test_weights_can_be_swapped_while_a_comparison_is_under_way(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4))
    scene.warm()
    with alarms() as messages:
        for value in (5.0, 7.0):
            for _ in range(CALLS_BETWEEN):
                scene.kept([*scene.weights])
            other = weight_of(4, 4, value=value)
            torch.utils.swap_tensors(scene.weights[0], other)  # type: ignore[no-untyped-call]
            scene.warm()
    assert not messages


def test_a_value_is_written_in_place_though_it_is_compared(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4))
    scene.warm(2)
    (entry,) = STORE.of_weight(scene.weights[0])
    address = entry.value.data_ptr()
    for _ in range(3):
        scene.weights[0].add_(1.0)
        scene.kept([*scene.weights])
    assert entry.value.data_ptr() == address


def test_threads_that_call_and_write(accelerator: Accelerator) -> None:
    """Each writes its own layer of a graph, where that is seen: nothing is stale, no alarm."""
    scene = Scene(accelerator, weight_of(8, 8))
    layers = [weight_of(8, 8, value=float(i)) for i in range(3)]
    wrong: list[Any] = []

    def work(layer: nn.Parameter) -> None:
        for i in range(200):
            if i % 5 == 0:
                layer.add_(1.0)
            if scene.call(layer) != [layer.bfloat16().double().sum().item()]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in layers]
    with alarms() as messages:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not wrong
    assert not messages


def test_an_error_while_comparing_ends_the_call(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no value would ever be written in place again."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    scene = Scene(accelerator, weight_of(4, 4))
    scene.call()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            scene.call()
    (entry,) = STORE.of_weight(scene.weights[0])
    assert engine().reusable((entry.slot,)) == [entry.value]


# ---------------------------------------------------------------------------- the order of streams


def on_two_streams(accelerator: Accelerator, scene: Scene) -> None:
    """Calls on both, so that both are known."""
    for stream in reversed(accelerator.streams):
        accelerator.current = stream
        scene.call()


def test_a_stream_that_calls_no_more_does_not_keep_memory_from_reuse(
    accelerator: Accelerator,
) -> None:
    """As a warm-up on a stream of its own, after which inductor records CUDA graphs."""
    scene = Scene(accelerator, weight_of(4, 4))
    on_two_streams(accelerator, scene)
    (entry,) = STORE.of_weight(scene.weights[0])
    addresses = [entry.value.data_ptr()]
    first = entry.value  # so that its memory is not used for the second
    for _ in range(3):
        scene.weights[0].mul_(1.5)
        assert scene.call() == scene.expected()
        addresses.append(entry.value.data_ptr())
    assert entry.value is not first, "the other stream may still read it"
    assert len(set(addresses)) == 2


def refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of memory")


def fail_in_a_step(scene: Scene, _: pytest.MonkeyPatch) -> None:
    step = StepCopies(torch.optim.SGD(scene.weights))
    with pytest.raises(RuntimeError), step.written(scene.weights):
        raise RuntimeError


def write_during_a_step(scene: Scene, _: pytest.MonkeyPatch) -> None:
    step = StepCopies(torch.optim.SGD(scene.weights))
    with step.written(scene.weights):
        scene.weights[0].mul_(1.5)


def fail_in_a_refresh(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.weights[0].mul_(1.5)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", refuse)
        with pytest.raises(RuntimeError, match="out of memory"):
            scene.call()


@pytest.mark.parametrize("act", [None, fail_in_a_step, write_during_a_step, fail_in_a_refresh])
def test_memory_that_another_stream_has_read_is_not_written(
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[Scene, pytest.MonkeyPatch], None] | None,
) -> None:
    """Nothing else refers to the value, so that only this keeps its memory from reuse."""
    scene = Scene(accelerator, weight_of(4, 4))
    scene.call()
    (entry,) = STORE.of_weight(scene.weights[0])
    for _ in range(3):
        on_two_streams(accelerator, scene)
        if act is not None:
            act(scene, monkeypatch)
        value = weakref.ref(entry.value)
        scene.weights[0].mul_(1.5)
        assert scene.call() == scene.expected()
        assert value() is None, "it was written in place"


def test_a_comparison_holds_what_it_reads(accelerator: Accelerator) -> None:
    scene = Scene(accelerator, weight_of(4, 4))
    on_two_streams(accelerator, scene)
    accelerator.held.clear()
    scene.call()
    assert accelerator.is_held(scene.weights[0], accelerator.current)


def test_what_another_graph_makes_is_waited_for(accelerator: Accelerator) -> None:
    """The second graph finds it fresh in its first call, which makes nothing."""
    first, second = accelerator.streams
    scene = Scene(accelerator, weight_of(4, 4))
    scene.call()
    made = first.recorded[-1]
    accelerator.current = second
    Scene(accelerator, *scene.weights).call()
    assert made in second.waited


def test_what_a_comparison_remembers_is_waited_for(accelerator: Accelerator) -> None:
    """What a graph without samples has made, another remembers on a stream of its own."""
    first, second = accelerator.streams
    maker = Scene(accelerator, weight_of(4, 4), verify="off")
    maker.call()
    accelerator.current = second
    scene = Scene(accelerator, *maker.weights)
    scene.call()
    accelerator.current = first
    scene.call()
    assert second.recorded[-1] in first.waited


def test_what_another_thread_remembers_right_before_a_comparison_is_waited_for(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = accelerator.streams
    scene = Scene(accelerator, weight_of(4, 4))
    on_two_streams(accelerator, scene)
    is_due = SampledEntries.is_due

    def meanwhile(place: SampledEntries) -> bool:
        monkeypatch.setattr(SampledEntries, "is_due", is_due)
        accelerator.current = second
        scene.weights[0].add_(1.0)
        scene.call()
        accelerator.current = first
        return is_due(place)

    monkeypatch.setattr(SampledEntries, "is_due", meanwhile)
    assert scene.call() == [16.0], "it began before the write"
    assert second.recorded[-1] in first.waited


def test_what_was_delivered_is_held_though_another_thread_made_it_again(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = accelerator.streams
    scene = Scene(accelerator, weight_of(4, 4))
    on_two_streams(accelerator, scene)
    (entry,) = STORE.of_weight(scene.weights[0])
    delivered = entry.value
    accelerator.current = second
    accelerator.held.clear()
    wait = STORE.wait_for_refreshes

    def meanwhile(devices: Any) -> None:
        monkeypatch.setattr(STORE, "wait_for_refreshes", wait)
        accelerator.current = first
        scene.weights[0].add_(1.0)
        scene.call()
        accelerator.current = second
        wait(devices)

    monkeypatch.setattr(STORE, "wait_for_refreshes", meanwhile)
    assert scene.call() == [16.0], "it began before the write"
    assert entry.value is not delivered
    assert accelerator.is_held(delivered, second)
    assert first.recorded[-1] in second.waited
