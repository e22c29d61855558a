"""No call computes with a stale value: programs, writes, ways to call, and threads at random."""

from __future__ import annotations

import functools
import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from amp_fx.weights.read_only import CHECK_ENVIRONMENT
from tests import needs
from tests.weights import planted
from tests.weights.machine import AGENTS, KEEP, PENDING, PROGRAMS, ROADS, WRITING, Session
from tests.weights.writes import SIGNALS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.weights.machine import Step

pytestmark = [needs.FROZEN_GRAPHS]

NO_KERNELS = ("eval", "train", "float16", "inference", "ambient", KEEP)
INDUCTOR = ("packed", "frozen", "kept", "trained")

SIMPLE = (
    "mul_",
    "data_mul_",
    "data_replaced",
    "data_swapped_inside",
    "foreach_copy_",
    "version_preserved",
    "set_",
    "numpy_of_detached",
    "parameter_replaced",
    "load_state_dict",
    "load_state_dict_assign",
    "layers_swapped",
    "bias_only",
    "copied_by_a_thread",
    "by_an_alias_with_the_version",
    "list_as_on_cuda",
)
"""Writes after which the same code runs."""

PREPARED = (
    "one_storage_for_both",
    "neighbour_of_another_model",
    "partly_frozen",
    "averages_swapped_in_and_out",
    "averages_swapped_by_pointer",
    "double_buffer",
    "slices_swapped",
    "flat_buffer",
    "neighbour_in_flat_buffer",
    "optimizer_with_a_kernel_of_its_own",
    "numpy_backed",
)
RACES = (
    *(
        ("write", name)
        for name in ("data_copy_", "foreach_copy_", "write_row_of_view", "bias_only")
    ),
    *(("cache", what) for what in ("clear", "invalidate", "collect")),
)
"""What a thread does while others call: each call reads a weight before or after it."""

INSIDE = (
    "mul_",
    "data_copy_",
    "data_replaced",
    "write_row_of_view",
    "foreach_mul_",
    "numpy_of_data",
)


def recompiles_without_end() -> Any:
    """One graph may serve many models, one after the other."""
    limits: dict[str, Any] = {"recompile_limit": 10**3, "fail_on_recompile_limit_hit": True}
    return torch._dynamo.config.patch(**limits)


def machine(ways: tuple[str, ...]) -> type[RuleBasedStateMachine]:
    """Returns a state machine whose steps are those of a ``Session``."""
    some = st.lists(st.sampled_from(ways), min_size=1, max_size=3)
    one = st.sampled_from(ways)
    layers = st.sampled_from(("a", "b", "ab"))

    class CachedValues(RuleBasedStateMachine):
        @initialize(
            program=st.sampled_from([*PROGRAMS]),
            prepared=st.sampled_from(PREPARED),
            names=some,
            calls=st.integers(0, 3),
        )
        def begin(self, program: str, prepared: str, names: list[str], calls: int) -> None:
            # PyTorch refuses branches whose operands share memory.
            assume(program != "bodies" or not {"flat", "one"} & {*prepared.split("_")})
            self.session = Session(program, prepared)
            self.names = names
            for _ in range(calls):
                self.session.call(*names)

        @rule(names=some)
        def call(self, names: list[str]) -> None:
            self.session.call(*names)

        @rule(name=st.sampled_from(SIMPLE))
        def write(self, name: str) -> None:
            self.session.write(name)
            self.session.call(*self.names)

        @rule(name=st.sampled_from((*SIMPLE, "prepared")))
        def write_only(self, name: str) -> None:
            self.session.write(name)

        @rule()
        def write_prepared(self) -> None:
            self.session.write("prepared")
            self.session.call(*self.names)

        @rule(
            road=st.sampled_from([*ROADS]),
            layers=layers,
            version=st.integers(0, 2),
            is_new=st.booleans(),
        )
        def move(self, road: str, layers: str, version: int, is_new: bool) -> None:
            self.session.move(road, layers, version, is_new)
            self.session.call(*self.names)

        @rule(
            way=one,
            name=st.sampled_from(INSIDE),
            agent=st.sampled_from([*AGENTS]),
            is_read=st.booleans(),
        )
        def write_inside(self, way: str, name: str, agent: str, is_read: bool) -> None:
            self.session.inside(way, name, agent, is_read)
            self.session.call(*self.names)

        @rule(name=st.sampled_from([name for name in ways if name != KEEP]))
        def forward(self, name: str) -> None:
            self.session.forward(name)

        @rule()
        def backward(self) -> None:
            self.session.backward()

        @rule(name=one)
        def spoil(self, name: str) -> None:
            if name != KEEP:
                self.session.spoil(name)

        @rule(write=st.sampled_from(SIMPLE))
        def together(self, write: str) -> None:
            self.session.call(*ways)
            self.session.write(write)
            self.session.together(*ways)

        @rule(step=st.sampled_from([*RACES]))
        def race(self, step: Step) -> None:
            self.session.call(*ways)
            self.session.race(step, *ways)
            self.session.call(*ways)

        @rule()
        def race_moves(self) -> None:
            self.session.call(*ways)
            self.session.race_moves(*ways)

        @rule(name=one)
        def settle(self, name: str) -> None:
            self.session.settle(name)

        @rule(layer=st.sampled_from("ab"), fate=st.sampled_from(("held", "written", "dropped")))
        def clone_lazily(self, layer: str, fate: str) -> None:
            self.session.clone_lazily(layer, fate)

        @rule(what=st.sampled_from(("clear", "invalidate", "invalidate one", "limit", "collect")))
        def cache(self, what: str) -> None:
            self.session.cache(what)

        @rule()
        def turn(self) -> None:
            self.session.turn()

        @rule()
        def renew(self) -> None:
            self.session.renew()

        def teardown(self) -> None:
            if hasattr(self, "session"):
                self.session.finish(self.names)

    return CachedValues


def run_machine(ways: tuple[str, ...], num_examples: int, num_steps: int = 30) -> None:
    """Runs random sessions, the same in every run unless ``AMP_FX_EXAMPLES`` asks for others."""
    wanted = int(os.environ.get("AMP_FX_EXAMPLES", "0"))
    chosen = settings(
        max_examples=wanted or num_examples,
        stateful_step_count=num_steps,
        phases=(Phase.explicit, Phase.generate),  # to shrink what compiles takes minutes
        deadline=None,
        derandomize=not wanted,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    with recompiles_without_end():
        run_state_machine_as_test(machine(ways), settings=chosen)


# ------------------------------------------------------------------------ every way to write

ALL_KINDS: tuple[str, ...] = ("eval", "train", "float16", "packed", KEEP)
RECOMPILED = (
    "becomes_a_subclass_and_plain_again",
    "buffer",
    "layers_grown",
    "orthogonal",
    "partly_frozen",
    "pruned_and_not",
    "spectral_norm",
    "weight_norm",
)
"""Writes to models of which each has code of its own: they are called in two ways."""


def kinds_of(write: str) -> tuple[str, ...]:
    return ALL_KINDS[:2] if write in RECOMPILED else ALL_KINDS


def failures(scenes: Mapping[str, tuple[Callable[[], Session], Sequence[Step]]]) -> str:
    """Returns a line for each scene in which a call was wrong."""

    def failure(new_session: Callable[[], Session], steps: Sequence[Step]) -> str:
        try:
            new_session().run(steps)
        except (AssertionError, RuntimeError) as error:
            PENDING.clear()
            torch._dynamo.reset()
            return f"{type(error).__name__}: {error}"[:300]
        return ""

    with recompiles_without_end():
        found = {name: failure(*scene) for name, scene in scenes.items()}
    return "\n".join(f"{name}: {text}" for name, text in found.items() if text)


def between_calls(write: str) -> list[Step]:
    """A call that detects a write must not hide it from another graph."""
    kinds = kinds_of(write)
    steps: list[Step] = [("settle", way) for way in kinds]
    for i in range(2 * len(kinds)):
        order = kinds[i % len(kinds) :] + kinds[: i % len(kinds)]
        steps += [("write", write), ("call", *order[: 1 + i % 2 * 4])]
    return [*steps, ("call", *kinds)]


def after_the_first_call(write: str) -> list[Step]:
    """Values may not have been computed yet, or by this very call."""
    first, *others = kinds_of(write)
    return [("call", first), *2 * [("write", write), ("call", first, first, *others)]]


def inside_a_call(write: str) -> list[Step]:
    """One weight has been read by then, the other has not."""
    kinds = kinds_of(write)
    steps: list[Step] = [("settle", way) for way in kinds]
    for way in ("eval", "train"):
        steps += [("inside", way, write, "directly"), ("call", way, *kinds)]
    return steps


ORDERS = (between_calls, after_the_first_call, inside_a_call)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("signal", SIGNALS)
def test_every_way_to_write(signal: str, order: Any) -> None:
    """Compares samples only for writes that no other signal reports."""
    verify = "sample" if signal == "sample" else "off"
    program = "event" if order is inside_a_call else "layers"
    scenes = {
        write: (functools.partial(Session, program, write, verify=verify), order(write))
        for write in SIGNALS[signal]
        if order is not inside_a_call or write != "layers_grown"  # sizes of one call must fit
    }
    assert not failures(scenes)


@pytest.mark.parametrize("way", ["eval", "train", "packed", "kept"])
def test_writes_during_a_call(way: str) -> None:
    """A weight that was read before, or is read later; values that this call computes."""
    writes = (*INSIDE, "everything", "layers_swapped")
    scenes = {
        f"{write} {agent} after {k} calls": (
            functools.partial(Session, "event"),
            [
                *k * [("call", way)],
                *2 * [("inside", way, write, agent, k == 1), ("call", way, way)],
            ],
        )
        for write, agent, k in itertools.product(writes, AGENTS, range(4))
        if k in (0, 3) or agent in ("directly", "by_a_thread")
    }
    assert not failures(scenes)


@pytest.mark.parametrize("way", ["eval", "train", "packed", KEEP])
def test_weights_move_there_and_back(way: str) -> None:
    scenes = {
        road: (
            functools.partial(Session, "layers"),
            [("settle", way)]
            + [
                step
                for layers in ("b", "a", "ab")
                for v in (1, 2, 1, 0, 1)
                for step in (("move", road, layers, v, False), ("call", way, way))
            ],
        )
        for road in ROADS
    }
    assert not failures(scenes)


def moved(way: str, road: str, names: str, version: int, num_calls: int = 1) -> list[Step]:
    return [("move", road, names, version, False), *num_calls * [("call", way)]]


@pytest.mark.parametrize("way", ["train", "packed", "kept"])
def test_scenes_that_once_failed(way: str) -> None:
    moves = {
        "three roads": (("data", "b", 1), ("tensor_set", "b", 0), ("storage_set", "b", 1)),
        "all weights": [("data", "ab", v) for v in (1, 0, 1, 0) for _ in range(2)],
        "the first weight moves last": [("data", names, v) for names in "ba" for v in 3 * (1, 0)],
    }
    scenes: dict[str, list[Step]] = {
        name: [s for road in roads for s in (("move", *road, False), ("call", way))]
        for name, roads in moves.items()
    }
    for write in ("everything", "data_replaced", "foreach_mul_", "averages_swapped_by_pointer"):
        for other in ("eval", way):
            scenes[f"{write} and {other} before a backward"] = 2 * [
                ("forward", way),
                ("write", write),
                ("call", other),
                ("backward",),
                ("call", other),
            ]
    scenes["an average in and out before a backward"] = 2 * [
        ("forward", way),
        ("write", "averages_swapped_in_and_out"),
        ("call", "eval"),
        ("write", "averages_swapped_in_and_out"),
        ("backward",),
        ("call", way),
    ]
    scenes["a cleared cache before a backward"] = [
        *(("forward", way), ("cache", "clear"), ("write", "everything")),
        *(("call", way), ("backward",)),
    ]
    for fate in ("held", "written", "dropped"):
        scenes[f"a lazy clone that is {fate}"] = [
            ("clone_lazily", "b", fate),
            ("call", way),
            *2 * [("write", "everything"), ("call", way)],
        ]
    scenes["many updates"] = [*20 * [("write", "everything"), ("call", way)], ("settle", way)]
    scenes["another storage at every sixth call"] = [
        s
        for names in 4 * ("b", "ab")
        for s in (("move", "data", names, 1, True), *6 * [("call", way)], ("settle", way))
    ]
    scenes["two dtypes of a buffer"] = [
        *(("call", way), ("call", "float16"), ("write", "mul_"), ("call", way)),
        *2 * [("write", "double_buffer"), ("call", way)],
    ]
    prepared = ("averages_swapped_in_and_out", "averages_swapped_by_pointer", "double_buffer")
    sessions = {
        name: (
            functools.partial(Session, "layers", *{*prepared} & {step[-1] for step in steps}),
            [("settle", way), *steps],
        )
        for name, steps in scenes.items()
    }
    assert not failures(sessions)


@pytest.mark.parametrize("way", ["frozen", "trained"])
def test_callers_may_write_to_results_and_gradients(way: str) -> None:
    """Also if kernels add in place, or a backward reads a value of a frozen weight last."""
    programs = ("computed", "elements", "exponents", "results", "saved")
    steps: list[Step] = [("call", way), ("spoil", way), ("write", "everything"), ("spoil", way)]
    scenes = {name: (functools.partial(Session, name, "partly_frozen"), steps) for name in programs}
    assert not failures(scenes)


def test_programs_that_write_their_weights() -> None:
    """A weight may be a buffer, or a part of one."""
    ways = ("eval", "inference", "frozen", "kept")
    scenes = {
        write: (functools.partial(Session, WRITING, write), 3 * [("write", write), ("call", *ways)])
        for write in ("buffer", "flat_buffer", "partly_frozen")
    }
    assert not failures(scenes)


def test_faults_can_be_planted() -> None:
    source = planted.SOURCE.read_text()
    assert all(source.count(text) == 1 for text, _ in planted.IN_CPP.values())
    attributes = [pair[:2] for pairs in planted.IN_PYTHON.values() for pair in pairs]
    assert all(hasattr(owner, name) for owner, name in attributes)


# ------------------------------------------------------------------------------ random sessions


def test_random_sessions() -> None:
    run_machine(NO_KERNELS, 20)


def test_random_sessions_with_inductor() -> None:
    run_machine(INDUCTOR, 6)


@pytest.mark.slow
@pytest.mark.parametrize(("ways", "num_examples"), [(NO_KERNELS, 300), (INDUCTOR, 60)])
def test_many_random_sessions(
    ways: tuple[str, ...], num_examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call compares its cached values and weights with copies as well."""
    monkeypatch.setenv(CHECK_ENVIRONMENT, "1")
    run_machine(ways, num_examples)
