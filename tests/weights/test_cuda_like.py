"""Weights that are written as CUDA writes lists of tensors, by optimizers and by list ops."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx.weights.watch import engine
from tests.weights.cuda_like import cuda_like, write_list
from tests.weights.machine import run_all
from tests.weights.nets import (
    EVAL,
    TRAIN,
    Net,
    assert_same,
    autocast,
    compile_amp_fx,
    counted_refreshes,
    make_net,
)
from tests.weights.test_cached_values import NO_KERNELS, run_machine
from tests.weights.test_optimizers import (
    loss_of,
    test_micro_batches_cast_once,
    test_never_stale_after_a_compiled_step,
    test_never_stale_after_a_step,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Tensors = list[torch.Tensor]
    ListWrite = Callable[[str, Tensors], Any]

__all__ = [
    "test_micro_batches_cast_once",
    "test_never_stale_after_a_compiled_step",
    "test_never_stale_after_a_step",
]


@pytest.fixture(autouse=True, scope="module")
def _cuda_like() -> Iterator[None]:
    engine().watch_list_ops()  # in Python it is done for accelerators only
    with cuda_like():
        yield


LISTS: dict[str, Callable[[Net], Tensors]] = {
    "parameters": lambda net: list(net.parameters()),
    "data": lambda net: [p.data for p in net.parameters()],
    "detached": lambda net: [p.detach() for p in net.parameters()],
    "views": lambda net: [p.data.view(-1)[1:] for p in net.parameters()],
    "one": lambda net: [net.b.weight.data],
}


def in_a_thread(write: ListWrite) -> ListWrite:
    def run(name: str, tensors: Tensors) -> None:
        run_all(lambda: torch.no_grad()(write)(name, tensors))

    return run


PLACES: dict[str, Callable[[ListWrite], ListWrite]] = {
    "no_grad": torch.no_grad(),
    "inference_mode": torch.inference_mode(),
    "thread": in_a_thread,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("write", ["aten::_foreach_mul_.Scalar", "aten::_fused_adamw_"])
@pytest.mark.parametrize(
    ("lists", "place"),
    [*((name, "no_grad") for name in LISTS), ("data", "inference_mode"), ("data", "thread")],
)
def test_never_stale_after_a_write_of_a_list(write: str, lists: str, place: str) -> None:
    """Calls a train and an eval graph, after each of three changes of model and twin."""
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    for graph in (TRAIN, EVAL, TRAIN, EVAL):
        graph.check(compiled, net, twin)
    for i in range(3):
        for model in (net, twin):
            with torch.no_grad():
                tensors = LISTS[lists](model)
            PLACES[place](write_list)(write, tensors)
        for graph in (EVAL, TRAIN)[:: 1 if i % 2 else -1]:
            graph.check(compiled, net, twin)


def test_random_sessions() -> None:
    run_machine(NO_KERNELS, 6)


def test_clipping_gradients_refreshes_nothing() -> None:
    """It writes lists too, but none of weights."""
    net, twin = make_net(), make_net()
    compiled = TRAIN.compile(net)
    loss_of(compiled).backward()  # type: ignore[no-untyped-call]
    loss_of(functools.partial(autocast, twin)).backward()  # type: ignore[no-untyped-call]
    with counted_refreshes() as num_refreshes:
        for model in (net, twin):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=True)
        assert_same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
        TRAIN.check(compiled, net, twin)
        EVAL.check(compiled, net, twin)
        assert num_refreshes() == 0
