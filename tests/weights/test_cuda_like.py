"""Weights that are written as CUDA writes lists of tensors: optimizers, and all list ops."""

from __future__ import annotations

import functools
import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from amp_fx.weights.watch import engine
from tests.weights.cuda_like import cuda_like
from tests.weights.nets import (
    EVAL,
    TRAIN,
    Net,
    assert_same,
    autocast,
    compile_amp_fx,
    counted_refreshes,
    inputs,
    make_net,
)
from tests.weights.test_cached_values import NO_KERNELS, run_machine
from tests.weights.test_optimizers import (
    loss_of,
    test_micro_batches_cast_once,
    test_never_stale_after_a_compiled_step,
    test_never_stale_after_a_step,
)
from tests.weights.writes import other

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Tensors = list[torch.Tensor]
    ListWrite = Callable[[Tensors, int], Any]

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


def fresh(tensors: Tensors, i: int) -> list[torch.Tensor]:
    """New tensors in the shapes of others, the same for a model and its twin."""
    return [other(10 * i + k, *tensor.shape) for k, tensor in enumerate(tensors)]


def steps_of(tensors: Tensors) -> list[torch.Tensor]:
    return [torch.ones(()) for _ in tensors]


FUSED: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01, "maximize": False}
FUSED_ADAM: dict[str, Any] = {**FUSED, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
FUSED_SGD: dict[str, Any] = {**FUSED, "momentum": 0.9, "dampening": 0.0, "nesterov": False}


def fused_adam(op: Any, tensors: Tensors, i: int, **options: Any) -> None:
    squares = [t.square() for t in fresh(tensors, i + 2)]
    moments: Any = fresh(tensors, i), fresh(tensors, i + 1), squares, [], steps_of(tensors)
    op(tensors, *moments, **{**FUSED_ADAM, **options})


def fused_sgd(tensors: Tensors, i: int, **options: Any) -> None:
    lists = fresh(tensors, i), fresh(tensors, i + 1)
    torch._fused_sgd_(tensors, *lists, **{**FUSED_SGD, "is_first_step": False, **options})


def fused_adagrad(tensors: Tensors, i: int) -> None:
    sums = [t.square() for t in fresh(tensors, i + 1)]
    lists = fresh(tensors, i), sums, steps_of(tensors)
    torch._fused_adagrad_(tensors, *lists, **FUSED, lr_decay=0.0, eps=1e-8)


LIST_WRITES: dict[str, ListWrite] = {
    "_foreach_mul_": lambda ts, _: torch._foreach_mul_(ts, 1.5),
    "_foreach_mul_tensor": lambda ts, _: torch._foreach_mul_(ts, torch.tensor(1.5)),
    "_foreach_copy_": lambda ts, i: torch._foreach_copy_(ts, fresh(ts, i)),
    "_foreach_lerp_": lambda ts, i: torch._foreach_lerp_(ts, fresh(ts, i), 0.25),
    "_foreach_add_": lambda ts, i: torch._foreach_add_(ts, fresh(ts, i), alpha=0.5),
    "_foreach_addcdiv_": lambda ts, i: torch._foreach_addcdiv_(ts, fresh(ts, i), fresh(ts, i + 1)),
    "_foreach_addcmul_": lambda ts, i: torch._foreach_addcmul_(ts, fresh(ts, i), fresh(ts, i + 1)),
    "_foreach_neg_": lambda ts, _: torch._foreach_neg_(ts),
    "_foreach_zero_": lambda ts, _: torch._foreach_zero_(ts),
    "_foreach_clamp_max_": lambda ts, i: torch._foreach_clamp_max_(ts, 0.5 / (i + 1)),
    "by_its_overload": lambda ts, _: torch.ops.aten._foreach_mul_.Scalar(ts, 1.5),
    "_fused_adamw_": functools.partial(fused_adam, torch._fused_adamw_),
    "_fused_adamw_tensor_lr": functools.partial(
        fused_adam, torch._fused_adamw_, lr=torch.tensor(0.1)
    ),
    "_fused_adam_": functools.partial(fused_adam, torch._fused_adam_),
    "_fused_sgd_": fused_sgd,
    "_fused_sgd_tensor_lr": functools.partial(fused_sgd, lr=torch.tensor(0.1)),
    "_fused_adagrad_": fused_adagrad,
}


def of_data(net: Net) -> list[torch.Tensor]:
    return [p.data for p in net.parameters()]


LISTS: dict[str, Callable[[Net], Tensors]] = {
    "parameters": lambda net: list(net.parameters()),
    "data": of_data,
    "detached": lambda net: [p.detach() for p in net.parameters()],
    "views": lambda net: [p.data.view(-1)[1:] for p in net.parameters()],
    "one": lambda net: [net.b.weight.data],
}


def check_after(change: Callable[[Net, int], Any]) -> None:
    """Calls a train and an eval graph, after each of three changes of model and twin."""
    net, twin = make_net(), make_net()
    compiled = compile_amp_fx(net)
    for graph in (TRAIN, EVAL, TRAIN, EVAL):
        graph.check(compiled, net, twin)
    for i in range(3):
        before = net.b.weight.detach().clone()
        for model in (net, twin):
            change(model, i)
        assert not torch.equal(before, net.b.weight) or i > 0, "it must have written"
        for graph in (EVAL, TRAIN)[:: 1 if i % 2 else -1]:
            graph.check(compiled, net, twin)


def in_a_thread(write: ListWrite) -> ListWrite:
    def run(tensors: Tensors, i: int) -> None:
        thread = threading.Thread(target=torch.no_grad()(write), args=(tensors, i))
        thread.start()
        thread.join()

    return run


PLACES: dict[str, Callable[[ListWrite], ListWrite]] = {
    "no_grad": torch.no_grad(),
    "inference_mode": torch.inference_mode(),
    "thread": in_a_thread,
}
WRITTEN_ANYWHERE = ("_foreach_mul_", "_fused_adamw_")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("write", "lists", "place"),
    [
        *itertools.product(LIST_WRITES, ["data"], ["no_grad"]),
        *itertools.product(
            WRITTEN_ANYWHERE, [name for name in LISTS if name != "data"], ["no_grad"]
        ),
        *itertools.product(
            WRITTEN_ANYWHERE, ["data"], [name for name in PLACES if name != "no_grad"]
        ),
    ],
)
def test_never_stale_after_a_write_of_a_list(write: str, lists: str, place: str) -> None:
    written = PLACES[place](LIST_WRITES[write])

    def change(net: Net, i: int) -> None:
        with torch.no_grad():
            tensors = LISTS[lists](net)
        written(tensors, i)

    check_after(change)


@pytest.mark.parametrize("write", ["_foreach_mul_", "_fused_sgd_"])
def test_never_stale_after_a_write_between_two_calls_of_one_forward(write: str) -> None:
    """A list is written inside the compiled program, at a graph break."""
    net, twin = make_net(), make_net()

    def program(model: Net, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = model(x)
        torch._dynamo.graph_break()
        rewrite(model)
        return torch.cat([first, model(x)])

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def rewrite(model: Net) -> None:
        LIST_WRITES[write](of_data(model), 0)

    compiled = compile_amp_fx(program)
    with torch.no_grad():
        for _ in range(4):
            out = compiled(net, inputs())
            # Autocast keeps casts for the length of a region; each graph is one of its own.
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                expected = program(twin, inputs())
            assert_same(out, expected.float())


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
