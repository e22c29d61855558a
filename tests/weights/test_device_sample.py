"""Samples on accelerators: the kernel in Triton's interpreter, all else on CPU tensors."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx import weight_cache
from amp_fx.weights.cast_plan import Plan
from amp_fx.weights.device_sample import Device, DeviceSample
from amp_fx.weights.engine import engine
from amp_fx.weights.kept_cast import Slot
from amp_fx.weights.kept_copies import CACHE, key_of
from tests.weights import sample_program
from tests.weights.alarms import alarms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@needs_triton
@pytest.mark.parametrize("check", sample_program.CHECKS)
def test_kernel(check: str) -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.weights.sample_program", check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class FakeEvent:
    """One whose work is done when the test says so."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


class FakeDevice(Device):
    """The CPU, as if it had streams: answers come when ``finish`` is called."""

    types = ("cpu",)

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []
        self.on_stream = 0

    def here(self, device: torch.device) -> contextlib.nullcontext[None]:
        assert device.type == "cpu"
        return contextlib.nullcontext()

    def stream(self, device: torch.device) -> int:
        assert device.type == "cpu"
        return self.on_stream

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)

    def record(self, device: torch.device) -> FakeEvent:
        assert device.type == "cpu"
        self.events.append(FakeEvent())
        return self.events[-1]

    def finish(self) -> None:
        for event in self.events:
            event.is_done = True


class Kept:
    """Kept copies of weights as a plan hands them to its samples."""

    def __init__(self, *sources: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        self.sources = list(sources)
        self.slots = [Slot(i, dtype, f"w{i}") for i in range(len(sources))]
        for slot, source in zip(self.slots, sources, strict=True):
            assert CACHE.copy_of(slot, source, "a test") is not None
        self.lows = [source.detach().to(dtype) for source in sources]
        self.device = FakeDevice()
        self.sample = DeviceSample(self.slots, self.device, has_kernel=False)

    def start(self) -> None:
        self.sample.start(self.sources, self.lows)

    def check(self) -> list[torch.Tensor | None] | None:
        self.start()
        self.device.finish()
        return self.sample.read()


def weights(*sizes: int) -> list[torch.Tensor]:
    return [torch.arange(1.0, size + 1) for size in sizes]


def test_equal_copies_are_never_suspected() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e38, 1e-44, 1.001])
    strided = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).t()
    behind = torch.cat([torch.full((9,), 5.0), torch.arange(1.0, 10.0)])[9:]
    for dtype in (torch.bfloat16, torch.float16):
        kept = Kept(odd, strided, behind, *weights(1, 7), dtype=dtype)
        assert all(kept.check() is None for _ in range(100))
        assert len(kept.device.events) == 100, "each call started a check"


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_changed_copy_is_found_in_its_turn(which: int) -> None:
    kept = Kept(*weights(1, 1, 1))
    kept.sources[which].numpy()[:] = 9.0
    found = [kept.check() for _ in range(2)]
    wanted = next(f for f in found if f is not None)
    assert all(f is s for f, s in zip(wanted, kept.sources, strict=True))


def test_one_changed_element_is_found_sooner_or_later() -> None:
    kept = Kept(*weights(8))
    kept.sources[0].numpy()[3] = float("nan")
    assert any(kept.check() is not None for _ in range(300))  # to miss it takes 4e-18


def test_a_flag_stays_until_it_is_read() -> None:
    kept = Kept(*weights(1))
    kept.sources[0].numpy()[:] = 9.0
    kept.start()
    kept.sources[0].numpy()[:] = 1.0
    kept.device.finish()
    assert kept.sample.read() is not None
    assert kept.check() is None


def test_one_check_is_under_way_and_read_when_it_is_done() -> None:
    kept = Kept(*weights(1))
    kept.sources[0].numpy()[:] = 9.0
    for _ in range(3):
        kept.start()
        assert kept.sample.read() is None, "it is not done"
    assert len(kept.device.events) == 1
    kept.device.finish()
    kept.start()
    assert len(kept.device.events) == 1, "the answer was not read"
    assert kept.sample.read() is not None
    assert kept.sample.read() is None
    kept.start()
    assert len(kept.device.events) == 2


def the_table(kept: Kept) -> Any:
    (table,) = kept.sample.tables.values()
    return table


def test_tables_are_kept_until_copies_move() -> None:
    kept = Kept(*weights(4))
    kept.check()
    first = the_table(kept)
    kept.check()
    assert the_table(kept) is first
    with CACHE.moving():
        kept.check()
        second = the_table(kept)
        assert second is not first
    kept.check()
    assert the_table(kept) is not second, "what is made in the midst of a change is dropped"


def test_tables_are_of_the_tensors_and_the_stream_that_they_were_made_for() -> None:
    kept = Kept(*weights(4))
    kept.check()
    first = the_table(kept)
    kept.lows = [low.clone() for low in kept.lows]
    kept.check()
    second = the_table(kept)
    assert second is not first
    kept.device.on_stream = 1
    kept.check()
    assert the_table(kept) is not second


def test_a_slow_path_drops_tables() -> None:
    before = CACHE.epoch
    plan, weight = plan_of(torch.ones(4, 4))
    call = plan.wrap(lambda x, low: x @ low.float())
    call(torch.ones(4), weight)
    assert CACHE.epoch != before
    before = CACHE.epoch
    call(torch.ones(4), weight)
    assert CACHE.epoch == before, "all was fresh"


def test_tables_hold_no_tensor() -> None:
    """A refresh writes in place where nobody holds the copy; swapping refuses weak references."""
    kept = Kept(*weights(4))
    references = [sys.getrefcount(t) for t in (kept.sources[0], kept.lows[0])]
    kept.start()
    assert [sys.getrefcount(t) for t in (kept.sources[0], kept.lows[0])] == references
    other = torch.ones(4)
    CACHE.drop(key_of(kept.slots[0], kept.sources[0]))
    torch.utils.swap_tensors(kept.sources[0], other)  # type: ignore[no-untyped-call]
    kept.device.finish()
    assert kept.sample.read() is None


def test_of_a_weight_that_died_nothing_is_left() -> None:
    kept = Kept(*weights(1, 1))
    for source in kept.sources:
        source.numpy()[:] = 9.0
    kept.start()
    survivor = kept.sources[1]
    del kept.sources[0], source
    kept.device.finish()
    assert kept.sample.read() == [None, survivor]


def test_layers_that_share_a_graph_all_get_their_turn() -> None:
    """The answer comes after a whole round of layers, so that the same one would start anew."""
    layers = [weights(1) for _ in range(4)]
    kept = Kept(*weights(1))
    lows = [[w.bfloat16() for w in layer] for layer in layers]
    for layer in layers:
        CACHE.copy_of(kept.slots[0], layer[0], "a test")
    for i in range(400):
        kept.sample.read()
        kept.sample.start(layers[i % 4], lows[i % 4])
        if i % 4 == 3:
            kept.device.finish()
    assert len(kept.sample.tables) == 4


def test_copies_that_cannot_be_compared_are_left_out() -> None:
    gaps = torch.ones(4, 4)[:, ::2]
    kept = Kept(gaps, torch.ones(0), torch.ones(3, dtype=torch.complex64).real, *weights(5))
    kept.check()
    assert [part.positions for part in the_table(kept).parts] == [[3]]
    kept.sample.device = Device()
    kept.device.on_stream = 1
    nothing = Kept(*weights(5))
    nothing.sample.device = Device()
    nothing.start()
    assert the_table(nothing).parts == [], "the CPU is no accelerator"


def test_one_launch_for_each_pair_of_dtypes() -> None:
    launches: list[Any] = []
    kept = Kept(*weights(4, 5), torch.ones(3, dtype=torch.float64))
    use_kernel(kept.sample, lambda *args: launches.append(args))
    kept.check()
    assert [launch[3:] for launch in launches] == [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.bfloat16),
    ]
    assert launches[0][0].tolist() == [
        [t.data_ptr() for t in kept.sources[:2]],
        [t.data_ptr() for t in kept.lows[:2]],
        [4, 5],
    ]


def test_addresses_count_the_offset_and_ask_for_no_pointer() -> None:
    launches: list[Any] = []
    source = torch.ones(8)[3:]
    kept = Kept(source)
    use_kernel(kept.sample, lambda *args: launches.append(args))
    assert engine().watched(source)
    kept.check()
    kept.sample.has_kernel = False
    kept.check()
    assert engine().watched(source), "neither way is a write"
    assert launches[0][0][0].item() == source.data_ptr()


def test_without_triton_that_works_torch_compares() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no C compiler")

    kept = Kept(*weights(1))
    kept.sources[0].numpy()[:] = 9.0
    use_kernel(kept.sample, fail)
    assert kept.check() is not None
    assert not kept.sample.has_kernel


def use_kernel(sample: DeviceSample, launch: Callable[..., None]) -> None:
    sample.has_kernel = True
    sample.kernel = lambda: launch


def test_random_states_of_the_user_are_left_alone() -> None:
    kept = Kept(*weights(100, 100))
    torch.manual_seed(1)
    random.seed(1)
    states = torch.get_rng_state(), random.getstate()
    for _ in range(10):
        kept.check()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_profile_names_it() -> None:
    kept = Kept(*weights(4))
    with torch.profiler.profile() as profile:
        kept.start()
    assert "amp_fx::sample" in {event.key for event in profile.key_averages()}


def plan_of(weight: torch.Tensor, verify: str = "sample") -> tuple[Plan, torch.Tensor]:
    """A plan of one weight that takes the CPU for an accelerator."""
    parameter = nn.Parameter(weight, requires_grad=False)
    slots = [Slot(1, torch.bfloat16, "encoder.weight")]
    plan = Plan(slots, owner="Net", passed=(0,), is_pure=True, verify=verify, on_accelerator=True)
    plan.look = engine().Look((1,), (0,), True, False)  # not as the CPU samples
    if plan.device_sample is not None:
        plan.device_sample = DeviceSample(slots, FakeDevice(), has_kernel=False)
    return plan, parameter


class Scene:
    """Calls of a plan, and its weight as an array that was taken before the first."""

    def __init__(self) -> None:
        plan, self.weight = plan_of(torch.ones(4, 4))
        assert plan.device_sample is not None
        self.device: Any = plan.device_sample.device
        self.array = self.weight.numpy()
        self._compiled = plan.wrap(lambda x, low: x @ low.float())
        self.call()

    def call(self) -> list[float]:
        """The sums of the weight's columns, once all that is queued was done."""
        self.device.finish()
        sums: list[float] = self._compiled(torch.ones(4), self.weight).tolist()
        return sums


def test_a_plan_notices_a_write_through_an_old_array() -> None:
    scene = Scene()
    with alarms() as messages:
        for _ in range(10):
            assert scene.call() == [4.0] * 4
        assert not messages
        scene.array[:] = 2.0
        assert [scene.call() for _ in range(3)] == [[4.0] * 4, [8.0] * 4, [8.0] * 4]
        for value in (3.0, 5.0):  # one element: nobody hopes for a sample any more
            scene.array[2, 1] = value
            assert scene.call() == [8.0, 6.0 + value, 8.0, 8.0]
    assert len(messages) == 1
    assert "encoder.weight of Net" in messages[0]


def test_a_copy_that_was_made_again_before_the_answer_came_is_trusted() -> None:
    scene = Scene()
    with alarms() as messages:
        scene.array[:] = 2.0
        assert scene.call() == [4.0] * 4, "it starts the check that tells"
        scene.weight.add_(1.0)
        assert scene.call() == [12.0] * 4
        num_refreshes = weight_cache.stats().refreshes
        assert scene.call() == [12.0] * 4
        assert weight_cache.stats().refreshes == num_refreshes
    assert not messages


def test_an_answer_is_about_the_layer_that_was_checked() -> None:
    """One graph serves two layers: the call that reads the answer is of the other."""
    scene = Scene()
    other = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    scene._compiled(torch.ones(4), other)
    with alarms() as messages:
        scene.array[:] = 2.0
        for _ in range(40):  # by chance one of the two starts a check
            scene.call()
            scene.device.finish()
            assert scene._compiled(torch.ones(4), other).tolist() == [4.0] * 4
        assert scene.call() == [8.0] * 4
    assert len(messages) == 1


@pytest.mark.parametrize("verify", ["off", "full"])
def test_other_ways_to_verify_do_not_sample(verify: str) -> None:
    plan, _ = plan_of(torch.ones(2, 2), verify)
    assert plan.device_sample is None


def test_a_plan_of_the_cpu_has_no_device_sample() -> None:
    slots: Sequence[Slot] = [Slot(0, torch.bfloat16)]
    plan = Plan(slots, owner="Net", passed=(), is_pure=True, verify="sample")
    assert plan.device_sample is None
