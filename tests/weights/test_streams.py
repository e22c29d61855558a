"""The order of streams on accelerators, the CPU being taken for one."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.weights.call import CachedCall
from amp_fx.weights.store import STORE
from tests import needs
from tests.weights.accelerator_like import Accelerator, accelerator_like
from tests.weights.specs import cast_spec

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
    """A graph that sums the casts of some weights.

    Args:
        weights: Those that it is called with; the graph takes as many.
        verify: As ``CachedCall`` takes it.
    """

    def __init__(self, *weights: torch.Tensor, verify: str = "sample") -> None:
        self.weights = list(weights)
        specs = [cast_spec(w, position=i, name=f"w{i}") for i, w in enumerate(weights)]
        self.kept = CachedCall(specs, (), owner="Net", verify=verify, compiled=_sums)

    def call(self, *weights: torch.Tensor) -> list[float]:
        """The sums."""
        sums: list[float] = self.kept([*(weights or self.weights)])
        return sums

    def expected(self) -> list[float]:
        """Returns the result of a call without stale values."""
        return [weight.bfloat16().double().sum().item() for weight in self.weights]


def test_full_verification_waits_for_other_streams(accelerator: Accelerator) -> None:
    weight = weight_of(4, 4)
    array = weight.numpy()
    scene = Scene(weight, verify="full")
    scene.call()
    accelerator.current = accelerator.streams[1]
    array[:] = 2.0
    with pytest.raises(amp_fx.errors.StaleWeightError):
        scene.call()
    assert accelerator.streams[0].recorded[-1] in accelerator.streams[1].waited


def on_two_streams(accelerator: Accelerator, scene: Scene) -> None:
    """Calls on both, so that both are known."""
    for stream in reversed(accelerator.streams):
        accelerator.current = stream
        scene.call()


def test_a_stream_that_calls_no_more_does_not_keep_memory_from_reuse(
    accelerator: Accelerator,
) -> None:
    """Calls on a stream once, like a warm-up after which inductor records CUDA graphs."""
    scene = Scene(weight_of(4, 4))
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


def fail_in_a_refresh(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.weights[0].mul_(1.5)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", refuse)
        with pytest.raises(RuntimeError, match="out of memory"):
            scene.call()


@pytest.mark.parametrize("act", [None, fail_in_a_refresh])
def test_memory_that_another_stream_has_read_is_not_written(
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[Scene, pytest.MonkeyPatch], None] | None,
) -> None:
    """Nothing else refers to the value, so that only this keeps its memory from reuse."""
    scene = Scene(weight_of(4, 4))
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


def test_what_another_graph_makes_is_waited_for(accelerator: Accelerator) -> None:
    """The second graph finds it fresh in its first call, which makes nothing."""
    first, second = accelerator.streams
    scene = Scene(weight_of(4, 4))
    scene.call()
    made = first.recorded[-1]
    accelerator.current = second
    Scene(*scene.weights).call()
    assert made in second.waited


def test_what_was_delivered_is_held_though_another_thread_made_it_again(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = accelerator.streams
    scene = Scene(weight_of(4, 4))
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
