"""Two threads call two graphs of one model while weights change between the calls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from amp_fx.weights.store import STORE
from tests.weights.machine import run_all
from tests.weights.nets import assert_same, autocast, compile_amp_fx, inputs, make_net

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


ROUNDS = 20


@torch.no_grad()
def test_calls_between_barriers() -> None:
    net, twin = make_net(), make_net()
    compiled = [compile_amp_fx(net), compile_amp_fx(net), compile_amp_fx(net.a)]
    oracles: list[Any] = [twin, twin, twin.a]
    for program in compiled:
        program(inputs())
    barrier = threading.Barrier(len(compiled) + 1, timeout=30)
    results: list[list[torch.Tensor]] = [[] for _ in compiled]

    def reader(k: int) -> Callable[[], None]:
        @torch.no_grad()
        def job() -> None:
            for _ in range(ROUNDS):
                barrier.wait()
                results[k] += [compiled[k](inputs()), compiled[k](inputs())]
                barrier.wait()

        return job

    expected: list[list[torch.Tensor]] = [[] for _ in compiled]

    @torch.no_grad()
    def writer() -> None:
        for _ in range(ROUNDS):
            for model in (net, twin):
                model.a.weight.data.mul_(-1.01)
            for k, oracle in enumerate(oracles):
                expected[k] += [autocast(oracle, inputs())] * 2
            barrier.wait()
            barrier.wait()

    run_all(writer, *(reader(k) for k in range(len(compiled))))
    assert_same(results, expected)


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
    original = STORE._recompute

    def slow(*args: Any) -> Any:
        if not started.is_set():
            started.set()
            finished.wait(1)
        return original(*args)

    monkeypatch.setattr(STORE, "_recompute", slow)
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
